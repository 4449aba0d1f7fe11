"""From closed steps to the process that writes lines: a thread takes steps off the journal, a pipe carries their numbers."""

import contextlib
import logging
import math
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import msgspec
import torch

from aorta.device.backend import accelerator
from aorta.device.marks import HostClock
from aorta.record.calls import RecordedStep
from aorta.record.collective_source import CollectiveSource
from aorta.record.extract import Extractor, Telemetry, of_host
from aorta.record.journal import Journal
from aorta.record.kernel_source import KernelSource
from aorta.records.schema import KernelCoverage, LibraryCoverage, StepRecord
from aorta.records.state import Tally
from aorta.records.writer import LineWriter, next_line_number
from aorta.steps.calibration import Calibration
from aorta.steps.event_steps import Resolver
from aorta.steps.process import Closed, Reply, frame_bytes, packed, read_frame
from aorta.steps.raw import RECORD_DTYPE, CollectiveChunk, Frame, KernelChunk, RawStep, ResolverSettings

logger = logging.getLogger(__name__)

Listener = Callable[[StepRecord], None]

PIPE_POLL_S = 0.2
"""Between two looks whether a process that takes nothing is still worth waiting for."""


class RecordSink(Protocol):
    """Takes the raw steps of one rank in order; records go to the file and to the listener."""

    def put(self, step: RawStep, reply: bool) -> None:
        """reply: the listener wants the record."""

    def put_kernels(self, chunk: KernelChunk) -> None:
        """Kernel records for the steps that they time; they may come before the step or after it."""

    def put_collectives(self, chunk: CollectiveChunk) -> None:
        """Events of the collective library for the steps that they belong to, likewise."""

    def calibrate(self, calibration: Calibration | None) -> None: ...

    def closing(self) -> None:
        """The run is about to end: no pause any more for whoever writes."""

    def close(self, timeout_s: float) -> int:
        """Write what is left; the number of lines that were lost."""
        ...


class ThreadSink:
    """Resolves where it is called. For CPUs, where the interpreter lock is not on a kernel's path."""

    def __init__(
        self, settings: ResolverSettings, writer: LineWriter, listener: Listener, tally: Tally | None = None
    ) -> None:
        self._resolver = Resolver(settings)
        self._writer = writer
        self._writer.max_bytes = settings.max_bytes
        self._listener = listener
        self._tally = tally

    def put(self, step: RawStep, reply: bool) -> None:
        record = self._resolver.resolve(step)
        written = self._writer.write(record)
        if self._tally is not None:
            self._tally.add(record, None if written else self._writer.why_lost)
        if reply:
            self._listener(record)

    def put_kernels(self, chunk: KernelChunk) -> None:
        raise NotImplementedError("a CPU has no kernel records")

    def put_collectives(self, chunk: CollectiveChunk) -> None:
        """On a CPU no step has any."""

    def calibrate(self, calibration: Calibration | None) -> None:
        self._resolver.calibrate(calibration)

    def closing(self) -> None:
        """Writes in the caller's own time."""

    def close(self, timeout_s: float) -> int:
        self._writer.close()
        if self._tally is not None:
            self._tally.close()
        return self._writer.num_lost


class ProcessSink:
    """Sends steps to `python -m aorta.steps.process`, which writes the file.

    The process sees the end of its pipe if this one is killed, and finishes the lines it has got. One that
    takes nothing (a disk that hangs) holds up the thread that calls `put`, and `close` no longer than its
    limit; one that somebody stopped goes on when the run ends. Of one that was killed the lines it leaves
    are counted.
    """

    def __init__(
        self, settings: ResolverSettings, path: Path, listener: Listener, state: Path | None = None
    ) -> None:
        """state: of the rank, for what was written of its steps."""
        self._listener = listener
        self._encoder = msgspec.msgpack.Encoder()
        self._closed: Closed | None = None
        self._num_steps = 0
        self._is_gone = False
        self._give_up_s = math.inf
        self._sending = threading.Lock()
        self._path = path
        self._first_number = next_line_number(path)
        self._process = subprocess.Popen(
            [
                sys.executable, "-m", "aorta.steps.process",
                str(path), msgspec.json.encode(settings).decode(), *([] if state is None else [str(state)]),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # a Ctrl-C at the terminal is for the training processes
        )  # fmt: skip
        assert self._process.stdin is not None
        os.set_blocking(self._process.stdin.fileno(), False)
        self._reader = threading.Thread(target=self._read, name="aorta-records", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """Of the process that writes."""
        return self._process.pid

    def put(self, step: RawStep, reply: bool) -> None:
        self._num_steps += 1
        self._send(Frame(step=step, reply=reply))

    def put_kernels(self, chunk: KernelChunk) -> None:
        self._send(Frame(kernels=chunk))

    def put_collectives(self, chunk: CollectiveChunk) -> None:
        self._send(Frame(collectives=chunk))

    @property
    def kernel_coverage(self) -> KernelCoverage | None:
        """After close: how collectives and kernels fit together; None where no step was timed by kernels."""
        return None if self._closed is None else self._closed.kernels

    @property
    def library_coverage(self) -> LibraryCoverage | None:
        """After close: how collectives and the library's events fit together; None where there were none."""
        return None if self._closed is None else self._closed.library

    def calibrate(self, calibration: Calibration | None) -> None:
        self._send(Frame(calibration={} if calibration is None else msgspec.to_builtins(calibration)))

    def closing(self) -> None:
        """Somebody may have stopped the process, and it has lines to write."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGCONT)

    def close(self, timeout_s: float) -> int:
        self.closing()
        self._give_up_s = time.monotonic() + timeout_s  # for a thread that is in `put` still, too
        self._send(Frame(close=True))
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._reader.join(max(0.0, self._give_up_s - time.monotonic()))
        try:
            self._process.wait(max(1.0, self._give_up_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._closed is None:
            num_lost = max(0, self._num_steps - (next_line_number(self._path) - self._first_number))
            logger.warning(
                "the process that writes %s ended early; %d steps of it are missing", self._path, num_lost
            )
            return num_lost
        return self._num_steps - self._closed.num_written

    def _send(self, frame: Frame) -> None:
        body = self._encoder.encode(frame)
        with self._sending:
            if self._is_gone:
                return
            try:
                self._write(frame_bytes(body))
            except (OSError, ValueError) as error:
                self._is_gone = True  # a part of a frame may be on its way: nothing may follow it
                what = "takes nothing" if isinstance(error, TimeoutError) else "is gone"
                logger.warning("recording stopped: the process that writes %s %s", self._path, what)

    def _write(self, data: bytes) -> None:
        assert self._process.stdin is not None
        descriptor, unsent = self._process.stdin.fileno(), memoryview(data)
        takes_more = select.poll()
        takes_more.register(descriptor, select.POLLOUT)
        while unsent:
            try:
                unsent = unsent[os.write(descriptor, unsent) :]
            except BlockingIOError:
                if time.monotonic() > self._give_up_s:
                    raise TimeoutError from None
                takes_more.poll(PIPE_POLL_S * 1e3)

    def _read(self) -> None:
        assert self._process.stdout is not None
        decoder = msgspec.msgpack.Decoder(Reply)
        while (body := read_frame(self._process.stdout)) is not None:  # type: ignore[arg-type]
            reply = decoder.decode(body)
            if reply.record is not None:
                self._listener(reply.record)
            if reply.closed is not None:
                self._closed = reply.closed


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
