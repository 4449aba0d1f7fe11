"""Steps that are closed and whose lines are not written yet, in a file beside the lines (the journal).

A SIGKILL of the training process loses none of them: UnwrittenSteps keeps them there, and the process that
writes lines, or a reader of the run, makes their records (`unwritten_steps`, `unwritten_after`).
"""

import logging
import os
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from aorta.files import open_regular, regular_descriptor
from aorta.records.files import files_beside, steps_name
from aorta.records.schema import StepRecord
from aorta.records.state import read_states
from aorta.records.table import LineKey
from aorta.steps.event_steps import EventSteps
from aorta.steps.kernel_steps import without_kernels
from aorta.steps.notes import RecordedStep, ResolverSettings, decoded, encoded

logger = logging.getLogger(__name__)

SPARE_BYTES = 1 << 16
"""Bytes of the file that may belong to safe steps, before the others are written anew."""
_HEAD_BYTES = 8
"""Bytes of length and checksum, before each step."""
_MOST_BYTES = 1 << 28
"""Bytes that are read."""

Written = tuple[int, int]
"""(rollbacks, global step) of a line: pairs that rise within an attempt."""


class UnwrittenSteps:
    """The file of a rank's closed steps whose lines are not written yet. Never raises OSError.

    A step is safe once the sink has taken it and the journal let go of it: its line is written, or the
    process that writes has its numbers, so that a SIGKILL of this one loses nothing. The file is for the
    others.
    """

    def __init__(
        self,
        path: Path,
        settings: ResolverSettings,
        read: Callable[[RecordedStep], RecordedStep | None],
    ) -> None:
        """read: returns what is kept of a closed step, its marks read; None: nothing is."""
        self._path, self._settings, self._read = path, settings, read
        self._offset = self._num = 0
        self._unsafe: deque[bytes] = deque()
        """Packed steps that are not safe yet, oldest first; b"" for one that is not kept."""
        self._num_unsafe_bytes = 0
        self._descriptor: int | None = None
        with suppress(OSError):
            self._descriptor = regular_descriptor(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW)

    def keep(self, step: RecordedStep, num_before: int) -> None:
        """Keep a recorded step whose window has ended.

        num_before: steps before it that are not safe yet.
        """
        if self._descriptor is None:
            return
        try:
            read = self._read(step)
            data = b"" if read is None else packed(self._num, self._settings, read)
        except Exception:  # we are on the training's thread, which must not fail for this
            logger.exception("aorta: steps are not kept beside their lines any more")
            self.close()
            return
        while len(self._unsafe) > num_before:
            self._num_unsafe_bytes -= len(self._unsafe.popleft())
        self._unsafe.append(data)
        self._num_unsafe_bytes += len(data)
        if not data:
            return
        self._num += 1
        if num_before == 0 or self._offset > 2 * self._num_unsafe_bytes + SPARE_BYTES:
            data, self._offset = b"".join(self._unsafe), 0
        with suppress(OSError):
            os.pwrite(self._descriptor, data, self._offset)
        self._offset += len(data)

    def close(self) -> None:
        """Remove the file: all steps are safe now."""
        if self._descriptor is not None:
            with suppress(OSError):
                os.close(self._descriptor)
            with suppress(OSError):
                self._path.unlink(missing_ok=True)
            self._descriptor = None


def packed(number: int, settings: ResolverSettings, step: RecordedStep) -> bytes:
    """A step as the journal keeps it: length, checksum, content. number: counts the steps that were kept."""
    body = encoded((number, settings, step))
    return len(body).to_bytes(4, "little") + zlib.crc32(body).to_bytes(4, "little") + body


class _Packed(msgspec.Struct, array_like=True):
    number: int
    settings: ResolverSettings
    step: RecordedStep


def unwritten_after(path: Path, last: LineKey | StepRecord | None) -> list[StepRecord]:
    """The journal's steps that follow `last`, the last one read of the rank's lines at path.

    Empty while another process still writes lines of the rank: it has steps that are in neither file.
    """
    rank_files = files_beside(path)
    if rank_files is None or not rank_files.unwritten.exists() or _has_writer(path):
        return []
    if last is None:
        return unwritten_steps(rank_files.unwritten, None, None)
    return unwritten_steps(
        rank_files.unwritten, (last.run_id, last.attempt), (last.rollbacks, last.global_step)
    )


def _has_writer(path: Path) -> bool:
    """Return True while another process writes the lines at path."""
    return any(
        state.has_writer and path.name == steps_name(rank) for rank, state in read_states(path.parent).items()
    )


def unwritten_steps(
    path: Path, attempt: tuple[str | None, int] | None, last: Written | None
) -> list[StepRecord]:
    """The journal's steps that follow the last line; none where the journal holds nothing usable.

    attempt: run id and attempt that they must belong to; None where no line says.
    """
    try:
        return list(_records(path, attempt, last))
    except (OSError, msgspec.MsgspecError, ValueError, ArithmeticError, LookupError, AssertionError):
        return []


def _records(
    path: Path, attempt: tuple[str | None, int] | None, last: Written | None
) -> Iterator[StepRecord]:
    event_steps: EventSteps | None = None
    for packed_step in _frames(path):
        settings = packed_step.settings
        if attempt is not None and (settings.run_id, settings.attempt) != attempt:
            return
        if last is None or (packed_step.step.rollbacks, packed_step.step.global_step) > last:
            if packed_step.step.kernels_lost is not None:
                yield without_kernels(packed_step.step, settings, packed_step.step.kernels_lost)
                continue
            event_steps = event_steps or EventSteps(settings)
            yield event_steps.resolve(packed_step.step)


def _frames(path: Path) -> Iterator[_Packed]:
    """Steps that are whole and numbered in sequence.

    The journal is written over again and again: behind the newest steps lie remains of earlier ones.
    """
    with open_regular(path) as file:
        data = file.read(_MOST_BYTES)
    position, number = 0, None
    while len(data) >= position + _HEAD_BYTES:
        size, checksum = (int.from_bytes(data[position + i : position + i + 4], "little") for i in (0, 4))
        body = data[position + _HEAD_BYTES : position + _HEAD_BYTES + size]
        if len(body) < size or zlib.crc32(body) != checksum:
            return
        packed_step = decoded(body, _Packed)
        if number is not None and packed_step.number != number + 1:
            return
        number = packed_step.number
        yield packed_step
        position += _HEAD_BYTES + size
