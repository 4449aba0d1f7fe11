"""The thread that resolves closed steps and writes their records.

It polls and never waits for the device, so it also works while the main thread is blocked in a
collective: whatever the device has finished is in the file a poll later.
"""

import logging
import threading
import time
from collections.abc import Callable

import torch

from aorta.recording.journal import Journal
from aorta.recording.resolve import Resolver
from aorta.records.schema import StepRecord

logger = logging.getLogger(__name__)

POLL_S = 0.02


class WriterThread:
    def __init__(
        self,
        journal: Journal,
        resolver: Resolver,
        finish: Callable[[StepRecord], None],
        device: torch.device | None,
    ) -> None:
        """finish: called on this thread with every record, in step order."""
        self._journal = journal
        self._resolver = resolver
        self._finish = finish
        self._device = device
        self._closing = threading.Event()
        self._abandoned = False
        self.num_unresolved = 0
        self._thread = threading.Thread(target=self._run, name="aorta-writer", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float) -> None:
        """Resolve and write what the device finishes within timeout_s; the rest is counted as lost."""
        self._closing.set()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._abandoned = True
            self._thread.join(1.0)
        self.num_unresolved = len(self._journal.closed)

    def _run(self) -> None:
        if self._device is not None:
            torch.cuda.set_device(self._device)
        try:
            while not self._abandoned:
                closing = self._closing.is_set()
                self._drain(closing)
                if closing and not self._journal.closed:
                    return
                if not closing:
                    self._closing.wait(POLL_S)
                else:
                    time.sleep(0.002)
        except Exception:
            # The instrument must not take training down: say it once, with the traceback.
            logger.exception("aorta: recording stopped, the rest of the run is not recorded")
            self._journal.stopped = True

    def _drain(self, closing: bool) -> None:
        closed = self._journal.closed
        while closed and not self._abandoned:
            step = closed[0]
            if not self._resolver.ready(step, closing):
                return
            record = self._resolver.resolve(step)
            closed.popleft()
            self._finish(record)
