"""The thread that takes closed steps off the journal and sends their numbers on.

It polls and never waits for the device, so it also works while the main thread is blocked in a
collective: whatever the device has finished is on its way to the file a poll later.
"""

import logging
import math
import threading
import time
from collections.abc import Callable

import torch

from aorta.device.backend import accelerator
from aorta.recording.extract import Extractor, Telemetry
from aorta.recording.journal import Journal
from aorta.recording.observers.collective_source import CollectiveSource
from aorta.recording.observers.kernel_source import KernelSource
from aorta.recording.run_folder.sink import RecordSink
from aorta.steps.raw import RECORD_DTYPE

logger = logging.getLogger(__name__)

LAST_KERNELS_S = 1.0

POLL_S = 0.05
"""Each poll takes the interpreter lock from the training loop for a moment."""
KERNELS_POLL_S = 0.5
"""The same where kernel records time the steps: the driver returns buffers every few steps, and the ring
holds those of half a second in any program."""
MANY_RECORDS = 1 << 16
"""Where one poll takes more, the next comes as soon as for events."""

ENDS_WITHIN_S = 1.0
"""So long after the recorder was closed the end of a call may still be told, by a thread of the backend."""

MOST_BEHIND = 64
"""So many steps are held back at most by a call that nobody waits for, and whose end is known from that."""


class WriterThread:
    def __init__(
        self,
        journal: Journal,
        extractor: Extractor,
        kernels: KernelSource,
        collectives: CollectiveSource,
        sink: RecordSink,
        telemetry: Callable[[], Telemetry],
        wants_records: Callable[[], bool],
        device: torch.device | None,
        beat: Callable[[], None] | None = None,
    ) -> None:
        """telemetry: the latest sample. wants_records: whether anybody listens for records. beat: called
        with every poll."""
        self._journal = journal
        self._extractor = extractor
        self._kernels = kernels
        self._collectives = collectives
        self._sink = sink
        self._telemetry = telemetry
        self._wants_records = wants_records
        self._device = device
        self._beat = beat
        self._awake = threading.Event()
        self._closing = threading.Event()
        self._abandoned = False
        self._ends_until_s = math.inf
        self.num_unresolved = 0
        self.num_lost = 0
        self._thread = threading.Thread(target=self._run, name="aorta-writer", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Look at the journal now. The thread lowers the flag before it looks: a raised one is enough."""
        if not self._awake.is_set():
            self._awake.set()

    def close(self, timeout_s: float) -> None:
        """Write what the device finishes within timeout_s; the rest is counted as lost."""
        self._ends_until_s = time.monotonic() + min(ENDS_WITHIN_S, timeout_s / 2)
        self._sink.closing()
        self._closing.set()
        self._awake.set()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._abandoned = True
            self._thread.join(1.0)
        self.num_unresolved = len(self._journal.closed)
        self.num_lost = self._sink.close(timeout_s)

    def _run(self) -> None:
        try:
            if self._device is not None:
                devices = accelerator()
                devices.set_device(self._device)
                devices.let_others_capture()
            while not self._abandoned:
                closing = self._closing.is_set()
                self._awake.clear()
                num_records = self._send_kernels()[0]
                self._send_collectives()
                self._drain()
                if self._beat is not None:
                    self._beat()
                if not closing:
                    is_rare = self._kernels.is_open and num_records < MANY_RECORDS
                    self._awake.wait(KERNELS_POLL_S if is_rare else POLL_S)
                elif self._journal.closed:
                    time.sleep(0.002)
                else:
                    self._send_last_kernels()
                    self._send_collectives(closing=True)
                    return
        except Exception:
            # The instrument must not take training down: say it once, with the traceback.
            logger.exception("aorta: recording stopped, the rest of the run is not recorded")
            self._journal.stopped = True
            self._journal.closed.clear()

    def _send_kernels(self, closing: bool = False, forced: bool = False) -> tuple[int, bool]:
        """Send the kernel records that have come: how many, and whether all that was launched is there."""
        chunks = self._kernels.poll(closing, forced)
        for chunk in chunks:
            if chunk.records or chunk.names or chunk.complete_ns:
                self._sink.put_kernels(chunk)
        num_records = sum(len(chunk.records) for chunk in chunks) // RECORD_DTYPE.itemsize
        return num_records, not chunks or chunks[-1].complete_ns > 0

    def _send_collectives(self, closing: bool = False) -> None:
        """Send the collective library's events that have ended; closing: all."""
        chunk = self._collectives.poll(closing)
        if chunk is not None and (chunk.events or chunk.names or chunk.complete_ns):
            self._sink.put_collectives(chunk)

    def _send_last_kernels(self) -> None:
        """The device has passed the last step; what else the program has queued is not waited for long."""
        deadline = time.monotonic() + LAST_KERNELS_S
        while not self._send_kernels(closing=True)[1]:
            if time.monotonic() > deadline or self._abandoned:
                self._send_kernels(closing=True, forced=True)
                return
            time.sleep(0.005)

    def _drain(self) -> None:
        closed = self._journal.closed
        while closed and not self._abandoned:
            step = closed[0]
            is_late = len(closed) > MOST_BEHIND or time.monotonic() > self._ends_until_s
            if not self._extractor.ready(step, is_late):
                return
            raw = self._extractor.extract(step, self._telemetry())
            if raw is None:
                return
            self._sink.put(raw, self._wants_records())
            closed.popleft()
