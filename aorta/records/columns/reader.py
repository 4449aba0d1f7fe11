"""A file of lines in pieces: columns where a block beside it is of exactly these lines, else the lines."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import accumulate, pairwise
from pathlib import Path
from typing import NamedTuple, get_args

import msgspec
import numpy as np

from aorta.errors import NOT_JSON
from aorta.files import open_regular
from aorta.records.columns.block import Block, read_block
from aorta.records.columns.column_block import ColumnBlock, Details, Part, part_of
from aorta.records.columns.flat import LIMIT, SPANS
from aorta.records.files import files_beside
from aorta.records.lines import LIMIT as MOST
from aorta.records.lines import LineOrder, are_possible, opened_lines, whole_lines_of
from aorta.records.schema import HOST_KINDS, READABLE_VERSIONS, Source

try:  # ten times as fast as zlib's
    from isal.isal_zlib import crc32
except ImportError:
    from zlib import crc32

MOST_LINES = 4096
"""Of blocks that are handed on as one: work on each as a whole is dear."""
MOST_BYTES = 6 << 20
"""Of their lines."""
_SOURCES, _KINDS = set(get_args(Source)), set(HOST_KINDS)
_DETAILS = msgspec.json.Decoder(Details)


def read_pieces(
    path: Path | str, order: LineOrder, with_details: bool = True
) -> Iterator[ColumnBlock | bytes]:
    """The file from its beginning to its end; bytes end with a line, the last ones where the file does.

    Lines that columns stand for have been checked, and count as read in `order`. with_details: their lists
    are read, too.
    """
    pieces: list[_Piece] = []
    for piece in _pieces(path, with_details):
        if pieces and (isinstance(piece, bytes) or _is_enough(pieces, piece)):
            yield from _joined(pieces, order)
            pieces = []
        if isinstance(piece, bytes):
            yield piece
        else:
            pieces.append(piece)
    if pieces:
        yield from _joined(pieces, order)


class _Piece(NamedTuple):
    """Lines and columns that are of exactly these."""

    part: Part
    number: int
    """Of the first line."""
    data: bytes


def _is_enough(pieces: Sequence[_Piece], following: _Piece) -> bool:
    last = pieces[-1]
    return (
        following.number != last.number + last.part.num_lines
        or sum(piece.part.num_lines for piece in pieces) >= MOST_LINES
        or sum(len(piece.data) for piece in pieces) >= MOST_BYTES
    )


def _joined(pieces: Sequence[_Piece], order: LineOrder) -> Iterator[ColumnBlock | bytes]:
    """The lines themselves where they are not plain, or not those that come next; where lines are missing
    before them, those of the first piece."""
    for num_left_out in range(min(2, len(pieces))):
        left = pieces[num_left_out:]
        block = ColumnBlock([piece.part for piece in left])
        if _is_plain(block):
            first, last = block.first, block.last
            attempts = (first.attempt, last.attempt)
            if order.follows(left[0].number, len(block), first.rank, first.run_id, attempts):
                yield block
                return
        yield left[0].data
    for piece in pieces[2:]:
        yield piece.data


def _pieces(path: Path | str, with_details: bool) -> Iterator[_Piece | bytes]:
    with opened_lines(path) as file:
        position = 0
        for block in _blocks(Path(path)):
            lines = block.head.lines
            if lines.offset < position:
                break
            for data in whole_lines_of(file, path, lines.offset - position):
                if not data.endswith(b"\n"):
                    break
                yield data
                position += len(data)
            if position < lines.offset:
                break
            data = file.read(lines.num_bytes)
            part = _checked(data, block, with_details)
            if part is None:
                break
            yield _Piece(part, lines.number, data)
            position += len(data)
        else:
            yield from whole_lines_of(file, path)
            return
        # A block that is not of these lines: those behind it are not, either.
        file.seek(position)
        yield from whole_lines_of(file, path)


def _blocks(path: Path) -> Iterator[Block]:
    """Up to one that is damaged or was not finished."""
    beside = files_beside(path)
    if beside is None:
        return
    with ExitStack() as stack:
        try:
            file = stack.enter_context(open_regular(beside.columns))
            while (block := read_block(file.read)) is not None:
                yield block
        except OSError:
            return


def _checked(data: bytes, block: Block, with_details: bool) -> Part | None:
    """None where the block is not of these lines."""
    lines = block.head.lines
    view = memoryview(data)
    bounds = list(pairwise(accumulate(lines.sizes, initial=0)))
    if len(data) != lines.num_bytes or [crc32(view[a:b]) for a, b in bounds] != lines.checksums:
        return None
    try:
        part = part_of(block, {})
        for row in part.rows_with_details() if with_details else ():
            first, end = bounds[row]
            part.details[row] = _DETAILS.decode(view[first:end])
    except (ValueError, KeyError, *NOT_JSON):
        return None
    return part


def _is_plain(block: ColumnBlock) -> bool:
    """Returns True where a run may have written such lines, all of one rank and run."""
    attempts, clock_error_us = block.integers("attempt"), block.numbers("clock_error_us")
    return (
        all(map(block.is_constant, ("schema", "rank", "world_size")))
        and ("run_id" not in block or block.is_constant("run_id"))
        and block.parts[0].constants["schema"] in READABLE_VERSIONS
        and bool((np.diff(attempts) >= 0).all())
        and (clock_error_us is None or not ((clock_error_us < 0) | (clock_error_us >= MOST)).any())
        and all(-LIMIT < size < LIMIT for size in _sizes(block))
        and set(block.places("source")[1]) <= _SOURCES
        and set(block.places(f"{SPANS}.kind")[1]) <= _KINDS
        and are_possible(block)
    )


def _sizes(block: ColumnBlock) -> Iterator[int]:
    """Those that are no columns."""
    for part in block.parts:
        for details in part.details.values():
            yield from (call.bytes for call in details.collectives or () if call.bytes is not None)
