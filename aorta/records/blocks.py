"""Step records many lines at a time, for statistics: from columns beside the lines, else from the lines.

A block of lines as a recorder writes them (sealed, one after the other, of one rank and run) is checked as a
whole, and what is not a number of a report is not decoded. Lines of any other block are read one by one, as
read_steps does, so that what is wrong with one is said in the same words.
"""

from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from aorta.records.columns import columns_of
from aorta.records.lines import LineReader, are_possible, opened_lines, whole_lines_of
from aorta.records.packed import unpack
from aorta.records.schema import READABLE_VERSIONS, CollectiveRecord, StepRecord
from aorta.records.table import FIELDS, LISTS, LineTable, StepTable
from aorta.timeline.arrays import Ints

try:  # ten times as fast as zlib's
    from isal.isal_zlib import crc32
except ImportError:
    from zlib import crc32

PIECE_BYTES = 1 << 18
"""What is decoded at once: with its objects it fits a core's own cache."""
TAIL_BYTES = 20
"""Of ',"crc32":"89abcdef"}'."""
NUMBER_KEY = b',"line":'
NOT_READ = frozenset((
    "loss", "lr", "grad_norm", "scalars", "streams", "modules", "instrument_ms", "is_recorded",
    "calls_learned",
))  # fmt: skip
"""Fields of a StepRecord that no report reads."""
OF_STATISTICS = tuple(name for name in (*FIELDS, *LISTS) if name.partition(".")[0] not in NOT_READ)
"""Columns that a report reads."""


class SegmentNumbers(msgspec.Struct, gc=False):
    """A Segment as statistics use it."""

    start_ms: float
    end_ms: float
    active_streams: tuple[str, ...]


def _fields_of(
    struct: type[msgspec.Struct], names: Iterable[str], **kinds: Any
) -> Iterator[tuple[str, Any, Any]]:
    """Those fields of a struct, for another one. kinds: types in place of its own."""
    for field in msgspec.structs.fields(struct):
        if field.name in names:
            default: dict[str, Any] = {"default": field.default, "default_factory": field.default_factory}
            yield field.name, kinds.get(field.name, field.type), msgspec.field(**default)


CallNumbers = msgspec.defstruct(
    "CallNumbers", _fields_of(CollectiveRecord, LISTS["collectives"]), kw_only=True, gc=False
)
StepNumbers = msgspec.defstruct(
    "StepNumbers",
    [
        *_fields_of(
            StepRecord,
            {*StepRecord.__struct_fields__} - NOT_READ - {"not_measured"},
            active_segments=list[SegmentNumbers] | None,
            collectives=list[CallNumbers] | None,  # type: ignore[valid-type]
        ),
        ("not_measured", msgspec.Raw, msgspec.Raw(b"{}")),  # line after line has the same text
        ("line", int),
    ],
    kw_only=True,
    gc=False,
)
"""The fields of a StepRecord that a report reads, with the number of its line."""


def read_blocks(
    path: Path, notes: list[str], *, whole: bool = False, left_out: list[str] | None = None
) -> Iterator[StepTable]:
    """The records of a file in order, as read_steps reads them.

    whole: all columns instead of those that a report reads.
    """
    reader = LineReader(path, notes, left_out)
    decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(StepNumbers)
    with opened_lines(path) as file:
        columns = columns_of(path, None if whole else OF_STATISTICS)
        if columns is not None:
            seal = columns.seal
            reader.order.follows(0, seal.num_lines, seal.rank, seal.run_id, seal.attempts)
            reader.num_lines = seal.num_lines
            file.seek(seal.lines_bytes)
            yield columns.table
        for piece in whole_lines_of(file, path):
            block = None if whole else _plain_block(piece, reader, decoder)
            if block is not None:
                yield block
            elif records := reader.records(piece):
                yield LineTable(records)
            if reader.is_cut_off:
                break
    reader.close()


def _plain_block(data: bytes, reader: LineReader, decoder: msgspec.json.Decoder[Any]) -> LineTable | None:
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
        inner = ends[np.searchsorted(ends, np.arange(PIECE_BYTES, len(data), PIECE_BYTES))] + 1
        bounds = list(dict.fromkeys((0, *inner.tolist(), len(data))))
        block = LineTable.of_pieces(_decoded(data[a:b], decoder) for a, b in pairwise(bounds))
        if len(block) == len(ends) and _is_next(block, letters, ends, reader):
            return block
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError):
        pass
    return None


def _decoded(lines: bytes, decoder: msgspec.json.Decoder[Any]) -> list[Any]:
    records: list[Any] = decoder.decode_lines(lines)
    for record in records:
        unpack(record)
    return records


def _have_checksums(data: bytes, letters: NDArray[np.uint8], starts: Ints, ends: Ints) -> bool:
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


def _is_next(block: LineTable, letters: NDArray[np.uint8], ends: Ints, reader: LineReader) -> bool:
    """Returns True, and counts the lines as read, where they are possible and follow those before them."""
    first, last = block.first, block.last
    numbers = np.array(block.values("line"), dtype=np.int64)
    constants = (block.values(name) for name in ("schema", "rank", "world_size", "run_id"))
    if (
        (np.diff(numbers) != 1).any()
        or numbers[0] < 0
        or (np.diff(block.integers("attempt")) < 0).any()
        or block.values("schema")[0] not in READABLE_VERSIONS
        or not all(values.count(values[0]) == len(values) for values in constants)
        or not _have_numbers(letters, ends, numbers)
        or not are_possible(block)
    ):
        return False
    is_next = reader.order.follows(
        int(numbers[0]), len(block), first.rank, first.run_id, (first.attempt, last.attempt)
    )
    reader.num_lines += len(block) if is_next else 0
    return is_next


def _have_numbers(letters: NDArray[np.uint8], ends: Ints, numbers: Ints) -> bool:
    """The number stands before the checksum, and nowhere else alone."""
    num_digits = np.maximum(np.searchsorted(_POWERS, numbers, side="right"), 1)
    begins = ends - TAIL_BYTES - num_digits - len(NUMBER_KEY)
    if begins.min() < 0:
        return False
    keys = letters[begins[:, None] + np.arange(len(NUMBER_KEY))]
    return bool((keys == np.frombuffer(NUMBER_KEY, dtype=np.uint8)).all())
