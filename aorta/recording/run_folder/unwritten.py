"""The closed steps of a rank, kept beside its lines until they are safe: a SIGKILL would take them along.

On a CPU a step is safe once it is a line. The thread that writes lines shares the interpreter with the
training; the raw numbers of a step are a few kB, and giving them to the page cache costs a tenth of making a
line of them. Whoever reads the folder next makes the lines (aorta.steps.process).

On a GPU a step is safe once the process that writes lines has it, which is up to half a second later. What
the host knows of it is kept until then, and that process makes a line of it when this one is gone. A step
that events time has no number yet that the host knows: it is not kept.
"""

import logging
import os
from collections import deque
from contextlib import suppress
from pathlib import Path

from aorta.device.marks import HostClock
from aorta.recording.calls import RecordedStep
from aorta.recording.extract import Extractor, Telemetry, of_host
from aorta.steps.process import packed
from aorta.steps.raw import RawStep, ResolverSettings

logger = logging.getLogger(__name__)

KILLED = "its process was killed"
KILLED_BEFORE_READ = "its process was killed before its kernels were read"
SPARE_BYTES = 1 << 16
"""So much of the file may be of steps that are safe, before those that are not are written anew."""


class UnwrittenSteps:
    """Their file. Never raises OSError."""

    def __init__(self, path: Path, settings: ResolverSettings) -> None:
        self._path, self._settings = path, settings
        self._extractor = Extractor(HostClock())
        self._offset = self._num = 0
        self._unsafe: deque[bytes] = deque()
        """Of the steps that are not safe, oldest first; b"" of one that is not kept."""
        self._num_unsafe_bytes = 0
        self._descriptor: int | None = None
        with suppress(OSError):
            self._descriptor = os.open(
                path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644
            )

    def keep(self, step: RecordedStep, num_before: int) -> None:
        """Keep a step whose window has ended; nothing where a collective of it still goes on.

        num_before: steps before it that are not safe yet.
        """
        if self._descriptor is None:
            return
        try:
            raw = self._raw(step)
            data = b"" if raw is None else packed(self._num, self._settings, raw)
        except Exception:  # on the training's thread: a fault of ours must not be its own
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

    def _raw(self, step: RecordedStep) -> RawStep | None:
        if self._settings.on_device:
            return of_host(step, KILLED_BEFORE_READ) if step.by_kernels else None
        if step.calls and not all(call.end or call.reason for call in step.calls):
            return None
        return self._extractor.extract(step, Telemetry(not_measured={"device": KILLED}))

    def close(self) -> None:
        """All steps are safe now."""
        if self._descriptor is not None:
            with suppress(OSError):
                os.close(self._descriptor)
            with suppress(OSError):
                self._path.unlink(missing_ok=True)
            self._descriptor = None
