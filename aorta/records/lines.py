"""Decodes the lines of a record file and checks each one's place and values.

`LineReader` reads whole lines (aorta.records.reader). `LineOrder`, `are_possible` and the pieces of a file
also serve aorta.records.blocks, which reads many lines at a time.
"""

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO, FileIO
from pathlib import Path
from typing import cast

import msgspec

from aorta.errors import RecordError
from aorta.files import open_regular
from aorta.records.packed import unpack
from aorta.records.rotation import DROPPED
from aorta.records.schema import READABLE_VERSIONS, StepRecord
from aorta.records.seal import Seal, seal_of
from aorta.records.table import StepTable

logger = logging.getLogger(__name__)

LIMIT = 2**53
"""Upper bound of counts and ms: no run reaches it, and floats are exact below."""
NOT_NEGATIVE = (
    "step_ms", "between_steps_ms", "host_ms", "tokens", "epoch", "step", "attempt", "rollbacks"
)  # fmt: skip
"""Fields that must not be negative."""
LONGEST_LINE = 1 << 26
"""Bytes of the longest line that is read; a step of 10,000 collectives with details takes 5 MB."""
BLOCK_BYTES = 1 << 21
"""Bytes read at once, some 1600 short lines. With a half of them, work per block is a fifth of all work."""

MISSING = re.compile(r" lines? (?:is|are) missing \(")
"""What a note has of a file with lines that are not there."""
_SHOWN = 4
"""Places of missing lines that a note names."""


class LineReader:
    """Lines of a file one after the other, each decoded whole and checked.

    A line that is no record, was changed or does not belong raises RecordError, or with a list left_out is
    left out: close() tells it there.
    """

    def __init__(self, path: Path | str, notes: list[str] | None, left_out: list[str] | None = None) -> None:
        self.order = LineOrder(path)
        self.num_lines = 0
        self.is_cut_off = False
        """The last line was cut off: nothing follows."""
        self._path = path
        self._notes = notes
        self._decoder = msgspec.json.Decoder(StepRecord)
        self._left_out = left_out
        self._faults: list[str] = []
        """Of each line that is left out, the first with its words."""

    def record(self, line: bytes) -> StepRecord | None:
        """The record of the next line; None for an empty line and one that was cut off or is left out.

        RecordError names the file and the line.
        """
        try:
            return self._checked(line)
        except RecordError as error:
            if self._left_out is None or _is_of_other_version(line):
                raise
            self._faults.append("" if self._faults else str(error).removeprefix(f"{self._path}:"))
            return None

    def _checked(self, line: bytes) -> StepRecord | None:
        self.num_lines += 1
        number = self.num_lines
        if not line.strip():
            return None
        try:
            record = self._decoder.decode(line)
            unpack(record)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            if _cut_off(line, error):
                _note(self._notes, f"{self._path}:{number}: the last line is cut off and left out")
                self.is_cut_off = True
                return None
            raise _line_error(self._path, number, line, error) from error
        if record.schema not in READABLE_VERSIONS:
            raise version_error(self._path, number, record.schema)
        self.order.check(number, seal_of(line), record)
        fault = fault_of(record)
        if fault:
            raise RecordError(f"{self._path}:{number}: impossible record: {fault}")
        return record

    def records(self, data: bytes) -> list[StepRecord]:
        """The records of a piece of the file, up to a line that was cut off."""
        records = (None if self.is_cut_off else self.record(line) for line in BytesIO(data))
        return [record for record in records if record is not None]

    def close(self) -> None:
        """Note what the lines lack as a whole."""
        for note in self.order.notes():
            _note(self._notes, note)
        if self._faults and self._left_out is not None:
            lines = "1 line is" if len(self._faults) == 1 else f"{len(self._faults)} lines are"
            self._left_out.append(f"{self._path}: {lines} left out, the first is line {self._faults[0]}")


class LineOrder:
    """Checks that the lines of a file are those of one run, all of them and in order."""

    def __init__(self, path: Path | str) -> None:
        self._path = path
        self._last: int | None = None
        self.run_id: str | None = None
        self.rank: int | None = None
        self.attempt = 0
        self._num_missing = 0
        self._missing: list[str] = []
        self._num_unsealed = self._num_sealed = 0

    def check(self, number: int, seal: Seal | None, record: StepRecord) -> None:
        """Raise RecordError where a line does not belong. number: its place in the file, from 1."""
        place = f"{self._path}:{number}"
        self.rank = record.rank if self.rank is None else self.rank
        if record.rank != self.rank:
            raise RecordError(
                f"{place}: mixes runs: rank {self.rank} and rank {record.rank} of {record.world_size}"
            )
        if seal is None:
            self._num_unsealed += 1
        else:
            self._num_sealed += 1
            if not seal.is_whole:
                raise RecordError(
                    f"{place}: damaged or changed after it was written: its checksum does not fit; "
                    "without this line the file can be read"
                )
            if self._last is not None and seal.number <= self._last:
                raise RecordError(
                    f"{place}: was written as line {seal.number + 1} and follows line {self._last + 1}: "
                    "lines are there twice or in another order"
                )
            self._miss(seal.number - (0 if self._last is None else self._last + 1), number, record)
            self._last = seal.number
        if record.run_id is not None:
            if self.run_id not in (None, record.run_id):
                raise RecordError(f"{place}: mixes runs: {record.run_id} follows {self.run_id}")
            self.run_id = record.run_id
            if record.attempt < self.attempt:
                raise RecordError(f"{place}: attempt {record.attempt} follows attempt {self.attempt}")
            self.attempt = record.attempt

    def follows(self, first: int, num: int, rank: int, run_id: str | None, attempts: tuple[int, int]) -> bool:
        """Return True where sealed lines `first` to `first + num - 1` come next; they then count as read.

        All are of one rank and run. attempts: of the first and the last line; the last is no less.
        """
        if first != (0 if self._last is None else self._last + 1) or rank != (
            rank if self.rank is None else self.rank
        ):
            return False
        if run_id is not None and (self.run_id not in (None, run_id) or attempts[0] < self.attempt):
            return False
        self._num_sealed += num
        self._last, self.rank = first + num - 1, rank
        if run_id is not None:
            self.run_id, self.attempt = run_id, attempts[1]
        return True

    @property
    def num_lines(self) -> int:
        """Numbers up to the last line's."""
        return 0 if self._last is None else self._last + 1

    @property
    def is_plain(self) -> bool:
        """True while all lines have a seal, and none is missing."""
        return not self._num_missing and not self._num_unsealed

    def notes(self) -> Iterator[str]:
        if self._num_missing:
            places = ", ".join(self._missing[:_SHOWN]) + (", ..." if len(self._missing) > _SHOWN else "")
            lines = "1 line is" if self._num_missing == 1 else f"{self._num_missing} lines are"
            yield f"{self._path}: {lines} missing ({places})"  # which MISSING finds
        if self._num_sealed and self._num_unsealed:
            yield f"{self._path}: {self._num_unsealed} lines have no checksum, others have"

    def _miss(self, num: int, number: int, record: StepRecord) -> None:
        # Lines dropped on purpose to bound the file are named by its first line.
        if num <= 0 or (self._last is None and (record.gap or "").startswith(DROPPED)):
            return
        self._num_missing += num
        self._missing.append(f"{num} before line {number}, global step {record.global_step}")


def fault_of(record: StepRecord) -> str | None:
    """The field and value that no run writes and arrays could not hold; None where there is none."""
    if not 0 <= record.rank < record.world_size < LIMIT:
        return f"rank {record.rank} of {record.world_size}"
    if not 0 <= record.global_step < LIMIT:
        return f"global_step {record.global_step}"
    if not 0 <= record.num_collectives < LIMIT:
        return f"num_collectives {record.num_collectives}"
    for name in NOT_NEGATIVE:
        value = getattr(record, name)
        if value is not None and (value < 0 or name == "step_ms" and not value < LIMIT):
            return f"{name} {value}"
    return None


def are_possible(block: StepTable) -> bool:
    """Return True where no record of a block has a fault. All its records are of one rank and world size."""
    for name in ("global_step", "num_collectives"):
        counts = block.integers(name)
        if counts.min() < 0 or counts.max() >= LIMIT:
            return False
    if not 0 <= block.first.rank < block.integers("world_size")[0] < LIMIT:
        return False
    for name in NOT_NEGATIVE:
        values = block.numbers(name)
        if values is not None and ((values < 0).any() or (name == "step_ms" and (values >= LIMIT).any())):
            return False
    return True


# -- pieces of a file ----------------------------------------------------------------------------------


def single_lines(path: Path | str) -> Iterator[bytes]:
    with opened_lines(path) as file:
        for piece in whole_lines_of(file, path):
            yield from BytesIO(piece)


@contextmanager
def opened_lines(path: Path | str) -> Iterator[FileIO]:
    """A file opened without buffer; RecordError where it cannot be opened or read."""
    try:
        with open_regular(path, buffering=0) as file:
            yield cast(FileIO, file)
    except OSError as error:
        raise RecordError(f"cannot read {path}: {error.strerror}") from error


def whole_lines_of(file: FileIO, path: Path | str) -> Iterator[bytes]:
    """The rest of a file in pieces that end with a line; the last may be cut off."""
    rest = b""
    while data := file.read(BLOCK_BYTES):
        end = data.rfind(b"\n") + 1
        if end:  # what follows the last newline waits for the rest of its line
            yield rest + data[:end]
            rest = data[end:]
            continue
        rest += data
        if len(rest) >= LONGEST_LINE:
            raise RecordError(f"{path} has a line of over {LONGEST_LINE >> 20} MB: no run writes one")
    if rest:
        yield rest


# -- lines that cannot be read -------------------------------------------------------------------------


def _cut_off(line: bytes, error: Exception) -> bool:
    """Return True for a line that a killed process left unfinished.

    Only a last line has no newline; a ValidationError is valid JSON, hence whole.
    """
    return (
        not line.endswith(b"\n")
        and line.lstrip().startswith(b"{")
        and not isinstance(error, msgspec.ValidationError)
    )


def _line_error(path: Path | str, number: int, line: bytes, error: Exception) -> RecordError:
    version = version_of(line)
    if version is not None and version not in READABLE_VERSIONS:
        return version_error(path, number, version)
    return RecordError(f"{path}:{number}: not a step record: {error}")


def _is_of_other_version(line: bytes) -> bool:
    """Return True for a whole line of a schema that is not read here: nothing is damaged."""
    version, seal = version_of(line), seal_of(line)
    return version is not None and version not in READABLE_VERSIONS and (seal is None or seal.is_whole)


def version_error(path: Path | str, number: int | None, version: int | None) -> RecordError:
    place = path if number is None else f"{path}:{number}"
    *others, last = map(str, sorted(READABLE_VERSIONS))
    readable = f"{', '.join(others)} and {last}"
    return RecordError(
        f"{place}: written with record schema {version}, this version of aorta reads {readable}"
    )


def version_of(data: bytes) -> int | None:
    try:
        return msgspec.json.decode(data, type=_Version).schema
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


class _Version(msgspec.Struct):
    schema: int


def _note(notes: list[str] | None, text: str) -> None:
    if notes is None:
        logger.warning(text)
    else:
        notes.append(text)
