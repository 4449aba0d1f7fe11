"""Step records in blocks, for statistics: many lines at a time, and only what numbers are made of.

A block of lines as a recorder writes them (sealed, one after the other, of one rank and run) is checked as a
whole, and what is not a number of a report is not decoded. Lines of any other block are read one by one, as
read_steps does, so that what is wrong with one is said in the same words.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from aorta.records.columns.column_block import ColumnBlock, part_of_records
from aorta.records.columns.number_block import NumberBlock
from aorta.records.columns.reader import read_pieces
from aorta.records.columns.step_block import StepBlock, StepNumbers
from aorta.records.lines import LineReader, are_possible
from aorta.records.schema import READABLE_VERSIONS

try:  # ten times as fast as zlib's
    from isal.isal_zlib import crc32
except ImportError:
    from zlib import crc32

TAIL_BYTES = 20
"""Of ',"crc32":"89abcdef"}'."""
NUMBER_KEY = b',"line":'


def read_blocks(path: Path | str, notes: list[str]) -> Iterator[NumberBlock]:
    """The records of a file in order, as read_steps reads them; of plain lines the numbers alone, from
    columns beside them where those are of exactly these lines."""
    reader = LineReader(path, notes)
    decoder = msgspec.json.Decoder(StepNumbers)
    for piece in read_pieces(path, reader.order):
        if not isinstance(piece, bytes):
            reader.num_lines += len(piece)
            yield piece
        elif (block := _plain_block(piece, reader, decoder)) is not None:
            yield block
        elif records := reader.records(piece):
            yield StepBlock(records)
        if reader.is_cut_off:
            break
    reader.close()


def read_columns(path: Path | str, notes: list[str]) -> Iterator[ColumnBlock]:
    """All numbers of a file's records but for their lists, in order. NotPlain where a record has some that no
    column holds."""
    reader = LineReader(path, notes)
    for piece in read_pieces(path, reader.order, with_details=False):
        if not isinstance(piece, bytes):
            reader.num_lines += len(piece)
            yield piece
        elif records := reader.records(piece):
            yield ColumnBlock([part_of_records(records)])
        if reader.is_cut_off:
            break
    reader.close()


def _plain_block(
    data: bytes, reader: LineReader, decoder: msgspec.json.Decoder[StepNumbers]
) -> StepBlock | None:
    """None where a line is not as a recorder writes it, or is not the one that comes next."""
    letters = np.frombuffer(data, dtype=np.uint8)
    ends = np.flatnonzero(letters == ord("\n"))
    if not len(ends) or ends[-1] != len(data) - 1:
        return None
    starts = np.concatenate(([0], ends[:-1] + 1))
    if (ends - starts).min() <= TAIL_BYTES + len(NUMBER_KEY) or not _have_checksums(
        data, letters, starts, ends
    ):
        return None
    try:
        records = decoder.decode_lines(data)
        if len(records) != len(ends):
            return None
        block = StepBlock(records)
        if _is_next(block, letters, ends, reader):
            return block
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError):
        pass
    return None


def _have_checksums(
    data: bytes, letters: NDArray[np.uint8], starts: NDArray[np.int64], ends: NDArray[np.int64]
) -> bool:
    tails = letters[ends[:, None] + np.arange(-TAIL_BYTES, 0)]
    digits = _HEX[tails[:, 10:18]]
    if not (tails[:, :10] == _KEY).all() or not (tails[:, 18:] == _CLOSE).all() or (digits > 15).any():
        return False
    written = (digits.astype(np.uint32) << _SHIFTS).sum(axis=1, dtype=np.uint32)
    view = memoryview(data)
    bounds = zip(starts.tolist(), (ends - TAIL_BYTES).tolist(), strict=True)
    return bool([crc32(view[a:b]) for a, b in bounds] == written.tolist())


_POWERS = 10 ** np.arange(19, dtype=np.int64)
_KEY = np.frombuffer(b',"crc32":"', dtype=np.uint8)
_CLOSE = np.frombuffer(b'"}', dtype=np.uint8)
_SHIFTS = np.arange(28, -1, -4, dtype=np.uint32)
_HEX = np.full(256, 255, dtype=np.uint8)
_HEX[np.frombuffer(b"0123456789abcdef", dtype=np.uint8)] = np.arange(16)


def _is_next(
    block: StepBlock, letters: NDArray[np.uint8], ends: NDArray[np.int64], reader: LineReader
) -> bool:
    """Returns True, and counts the lines as read, where they are possible and follow those before them."""
    records: Any = block.records
    first, last = records[0], records[-1]
    numbers = np.array([record.line for record in records], dtype=np.int64)
    if (
        (np.diff(numbers) != 1).any()
        or numbers[0] < 0
        or not (block.is_constant("attempt") or (np.diff(block.values["attempt"]) >= 0).all())
        or first.schema not in READABLE_VERSIONS
        or not all(map(block.is_constant, ("schema", "rank", "world_size", "run_id")))
        or not _have_numbers(letters, ends, numbers)
        or not are_possible(block)
    ):
        return False
    is_next = reader.order.follows(
        first.line, len(records), first.rank, first.run_id, (first.attempt, last.attempt)
    )
    reader.num_lines += len(records) if is_next else 0
    return is_next


def _have_numbers(letters: NDArray[np.uint8], ends: NDArray[np.int64], numbers: NDArray[np.int64]) -> bool:
    """The number stands before the checksum, and nowhere else alone."""
    num_digits = np.maximum(np.searchsorted(_POWERS, numbers, side="right"), 1)
    begins = ends - TAIL_BYTES - num_digits - len(NUMBER_KEY)
    if begins.min() < 0:
        return False
    keys = letters[begins[:, None] + np.arange(len(NUMBER_KEY))]
    return bool((keys == np.frombuffer(NUMBER_KEY, dtype=np.uint8)).all())
