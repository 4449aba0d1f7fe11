"""Step records in blocks, for statistics: many lines at a time, and only what numbers are made of.

A block of lines as a recorder writes them (sealed, one after the other, of one rank and run) is checked as a
whole, and what is not a number of a report is not decoded. Lines of any other block are read one by one, as
read_steps does, so that what is wrong with one is said in the same words.
"""

import math
from collections.abc import Iterator, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from aorta.errors import RecordError
from aorta.records.reader import LIMIT, LONGEST_LINE, LineReader
from aorta.records.schema import (
    READABLE_VERSIONS,
    DeviceRecord,
    HostSpan,
    KernelSums,
    MemoryRecord,
    OverlapRecord,
    Segment,
    Source,
    StepRecord,
)

try:  # ten times as fast as zlib's
    from isal.isal_zlib import crc32
except ImportError:
    from zlib import crc32

BLOCK_BYTES = 1 << 20
"""Some eight hundred short lines: fewer, and the work on each block as a whole is half of all work."""
TAIL_BYTES = 20
"""Of ',"crc32":"89abcdef"}'."""
NUMBER_KEY = b',"line":'
FIELDS = (
    "schema", "rank", "world_size", "run_id", "attempt", "rollbacks", "epoch", "step", "global_step",
    "tokens", "source", "start_unix_ns", "clock_error_us", "step_ms", "between_steps_ms", "host_ms",
    "num_collectives", "gap",
)  # fmt: skip
MAY_NOT_BE_NEGATIVE = (
    "step_ms", "between_steps_ms", "host_ms", "tokens", "epoch", "step", "attempt", "rollbacks"
)  # fmt: skip


class CallNumbers(msgspec.Struct, gc=False):
    """The fields of a CollectiveRecord that statistics use."""

    op: str
    stream: str
    group: str
    ranks: list[int]
    bytes: int | None
    dtype: str
    seq: int
    start_ms: float | None
    end_ms: float | None


class StepNumbers(msgspec.Struct, kw_only=True, gc=False):
    """The fields of a StepRecord that statistics use, with the number of its line."""

    schema: int
    rank: int
    world_size: int
    epoch: int
    step: int
    global_step: int
    tokens: int | None
    source: Source
    start_unix_ns: int
    clock_error_us: float | None
    step_ms: float | None
    between_steps_ms: float | None
    host_ms: float | None
    overlap: OverlapRecord
    active_segments: list[Segment] | None
    collectives: list[CallNumbers] | None
    num_collectives: int
    exposed_run_lengths_ns: list[int] | None = None
    kernels: KernelSums | None = None
    memory: MemoryRecord | None = None
    device: DeviceRecord | None = None
    host_spans: list[HostSpan] | None = None
    run_id: str | None = None
    attempt: int = 0
    rollbacks: int = 0
    gap: str | None = None
    not_measured: dict[str, str] = {}
    line: int


Numbers = StepRecord | StepNumbers


class StepBlock:
    """Neighbouring lines of one file."""

    def __init__(self, records: Sequence[Numbers]) -> None:
        self.records = records
        self.values: dict[str, tuple[Any, ...]] = fields_of(records, FIELDS)
        """By field, a value per record."""

    def __len__(self) -> int:
        return len(self.records)

    def integers(self, name: str) -> NDArray[np.int64]:
        """A field that every record has. Raises OverflowError."""
        return np.array(self.values[name], dtype=np.int64)

    def floats(self, name: str) -> NDArray[np.float64] | None:
        """A field, NaN where it is None; None where it is that in every record."""
        return floats(self.values[name])


def fields_of(items: Sequence[Any], names: tuple[str, ...]) -> dict[str, tuple[Any, ...]]:
    """Attributes of the items as columns."""
    return dict(zip(names, zip(*map(attrgetter(*names), items), strict=True), strict=True))


def floats(values: Sequence[float | None]) -> NDArray[np.float64] | None:
    """Numbers, NaN in place of None; None where there is no number."""
    num_missing = values.count(None)
    if num_missing == len(values):
        return None
    if num_missing:  # numpy takes None too, four times slower
        values = [math.nan if value is None else value for value in values]
    return np.array(values, dtype=np.float64)


def read_blocks(path: Path | str, notes: list[str]) -> Iterator[StepBlock]:
    """The records of a file in order, as read_steps reads them; of plain lines the numbers alone."""
    reader = LineReader(path, notes)
    decoder = msgspec.json.Decoder(StepNumbers)
    for data in _whole_lines(path):
        block = _plain_block(data, reader, decoder)
        if block is None:
            records = [record for line in _split(data) if (record := _next(reader, line)) is not None]
            block = StepBlock(records) if records else None
        if block is not None:
            yield block
        if reader.is_cut_off:
            break
    reader.close()


def _next(reader: LineReader, line: bytes) -> StepRecord | None:
    return None if reader.is_cut_off else reader.record(line)


def _split(data: bytes) -> list[bytes]:
    """Lines with their newlines."""
    lines = data.split(b"\n")
    return [line + b"\n" for line in lines[:-1]] + ([lines[-1]] if lines[-1] else [])


def _whole_lines(path: Path | str) -> Iterator[bytes]:
    """The file in pieces that end with a line; the last one where the file does."""
    try:
        with open(path, "rb", buffering=0) as file:
            rest = b""
            while data := file.read(BLOCK_BYTES):
                end = data.rfind(b"\n") + 1
                if end:
                    yield rest + data[:end]
                    rest = data[end:]
                    continue
                rest += data
                if len(rest) >= LONGEST_LINE:
                    raise RecordError(f"{path} has a line of over {LONGEST_LINE >> 20} MB: no run writes one")
            if rest:
                yield rest
    except OSError as error:
        raise RecordError(f"cannot read {path}: {error.strerror}") from error


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
        or (np.diff(block.integers("attempt")) < 0).any()
        or first.schema not in READABLE_VERSIONS
        or any(len(set(block.values[name])) > 1 for name in ("schema", "rank", "world_size", "run_id"))
        or not _have_numbers(letters, ends, numbers)
        or not _are_possible(block)
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


def _are_possible(block: StepBlock) -> bool:
    """As the reader of single lines asks, of all at once."""
    first: Any = block.records[0]
    for name in ("global_step", "num_collectives"):
        if min(block.values[name]) < 0 or max(block.values[name]) >= LIMIT:
            return False
    if not 0 <= first.rank < first.world_size < LIMIT:
        return False
    for name in MAY_NOT_BE_NEGATIVE:
        values = block.floats(name)
        if values is not None and ((values < 0).any() or (name == "step_ms" and (values >= LIMIT).any())):
            return False
    return True
