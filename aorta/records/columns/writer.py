"""Writes the columns of a rank's lines beside them."""

import os
from contextlib import suppress
from pathlib import Path

import msgspec

from aorta.files import regular_descriptor
from aorta.records.columns.block import Lines, block_bytes, read_block
from aorta.records.columns.flat import NotPlain, flat_columns
from aorta.records.schema import StepRecord

MOST_LINES = 256
MOST_BYTES = 512 << 10
"""Of lines that wait for their block: what a block holds is in memory until then."""
WRONG = (NotPlain, TypeError, ValueError, OverflowError, AttributeError, LookupError, msgspec.MsgspecError)
"""What no block can be made of; the lines are there all the same."""


class ColumnsWriter:
    """Appends blocks to the file of columns. Never raises: lines without columns are read as lines.

    Lines of which no block was written yet, when the process is killed or the disk is full, have none.
    """

    def __init__(self, path: Path) -> None:
        self.num_bytes = 0
        """Of the file."""
        self._path = path
        self._descriptor: int | None = None
        self._is_given_up = False
        self._records: list[StepRecord] = []
        self._lines = Lines(0, 0, [], [])
        self._num_waiting = 0

    def add(self, record: StepRecord, number: int, offset: int, num_bytes: int, checksum: int) -> None:
        """A record whose line is in the file: its number, where it begins, its size and the CRC-32 of it
        with its newline."""
        lines = self._lines
        if self._records and (number, offset) != (
            lines.number + len(lines.sizes),
            lines.offset + self._num_waiting,
        ):
            self.flush()
            lines = self._lines
        if not self._records:
            lines.number, lines.offset = number, offset
        self._records.append(record)
        lines.sizes.append(num_bytes)
        lines.checksums.append(checksum)
        self._num_waiting += num_bytes
        if len(self._records) >= MOST_LINES or self._num_waiting >= MOST_BYTES:
            self.flush()

    def flush(self) -> None:
        """Writes the block of the lines that wait for it."""
        records, lines = self._records, self._lines
        self._forget()
        if not records or self._is_given_up:
            return
        try:
            data = block_bytes(lines, flat_columns(records))
        except WRONG:
            return
        self._append(data, lines.offset)

    @staticmethod
    def remove(path: Path) -> None:
        """Columns of other lines go."""
        with suppress(OSError):
            path.unlink(missing_ok=True)

    def restart(self) -> None:
        """The lines were written anew: no block is of them."""
        self._forget()
        self.remove(self._path)
        self._close()
        self.num_bytes, self._is_given_up = 0, self._path.exists()

    def close(self) -> None:
        self.flush()
        self._close()

    def _forget(self) -> None:
        self._records, self._lines, self._num_waiting = [], Lines(0, 0, [], []), 0

    def _close(self) -> None:
        if self._descriptor is not None:
            with suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = None

    def _append(self, data: bytes, offset: int) -> None:
        """offset: in the lines, at which those of the block begin."""
        try:
            if self._descriptor is None:
                self._descriptor, self.num_bytes = _opened(self._path, offset)
            unwritten, position = memoryview(data), self.num_bytes
            while unwritten:
                num = os.pwrite(self._descriptor, unwritten, position)
                unwritten, position = unwritten[num:], position + num
            self.num_bytes = position
        except OSError:
            self._cut_off()

    def _cut_off(self) -> None:
        """Takes away what is left of a block that did not fit on the disk."""
        if self._descriptor is None:
            self._is_given_up = True
            return
        try:
            os.ftruncate(self._descriptor, self.num_bytes)
        except OSError:
            self._is_given_up = True


def _opened(path: Path, offset: int) -> tuple[int, int]:
    """The file, and where its last block ends, of those of lines before `offset`. Raises OSError."""
    descriptor = regular_descriptor(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
    try:
        end = 0
        with open(descriptor, "rb", closefd=False) as file:
            while (block := read_block(file.read)) is not None:
                lines = block.head.lines
                if lines.offset + lines.num_bytes > offset:
                    break
                end += block.num_bytes
        os.ftruncate(descriptor, end)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor, end
