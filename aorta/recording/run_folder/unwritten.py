"""The closed steps of a rank on a CPU, kept beside its lines until they are lines.

There the thread that writes lines shares the interpreter with the training: a SIGKILL right behind a step
would take the step along. Its raw numbers are a few kB, and giving them to the page cache costs a tenth of
making a line of them. Whoever reads the folder next makes the lines (aorta.steps.unwritten). On a GPU
another process has them by then.
"""

import logging
import os
from contextlib import suppress
from pathlib import Path

from aorta.device.marks import HostClock
from aorta.recording.calls import RecordedStep
from aorta.recording.extract import Extractor, Telemetry
from aorta.steps.raw import ResolverSettings
from aorta.steps.unwritten import packed

logger = logging.getLogger(__name__)

KILLED = Telemetry(not_measured={"device": "its process was killed"})


class UnwrittenSteps:
    """Their file. Never raises OSError."""

    def __init__(self, path: Path, settings: ResolverSettings) -> None:
        self._path, self._settings = path, settings
        self._extractor = Extractor(HostClock())
        self._offset = self._num = 0
        self._descriptor: int | None = None
        with suppress(OSError):
            self._descriptor = os.open(
                path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644
            )

    def keep(self, step: RecordedStep, alone: bool) -> None:
        """Keep a step whose window has ended; nothing where a collective of it still goes on.

        alone: all steps before it are lines.
        """
        if self._descriptor is None:
            return
        if step.calls and not all(call.end or call.reason for call in step.calls):
            return
        try:
            raw = self._extractor.extract(step, KILLED)
            data = None if raw is None else packed(self._num, self._settings, raw)
        except Exception:  # on the training's thread: a fault of ours must not be its own
            logger.exception("aorta: steps are not kept beside their lines any more")
            self.close()
            return
        if data is None:
            return
        offset = 0 if alone else self._offset
        with suppress(OSError):
            os.pwrite(self._descriptor, data, offset)
        self._offset = offset + len(data)
        self._num += 1

    def close(self) -> None:
        """All steps are lines now."""
        if self._descriptor is not None:
            with suppress(OSError):
                os.close(self._descriptor)
            with suppress(OSError):
                self._path.unlink(missing_ok=True)
            self._descriptor = None
