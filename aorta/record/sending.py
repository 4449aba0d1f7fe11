"""Brings closed steps out of the training process, to the one that writes their lines.

SendingThread takes steps off the journal once the device has passed them, and puts their numbers into a sink.
On a GPU that is ProcessSink, a pipe to a process of its own, so that resolving and writing never hold the
interpreter lock of the training loop; on a CPU ThreadSink resolves them right there. UnwrittenSteps keeps
what is closed and not written yet in a file, so that a SIGKILL loses no step.
"""

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
from itertools import islice
from pathlib import Path
from typing import Protocol

import msgspec
import torch

from aorta.device.backend import accelerator
from aorta.device.marks import HostClock
from aorta.files import regular_descriptor
from aorta.record.extract import Extractor, Telemetry, host_only
from aorta.record.journal import Journal
from aorta.record.kernel_source import KernelSource
from aorta.records.schema import DeviceRecord, KernelCoverage, StepRecord
from aorta.records.state import Tally
from aorta.records.writer import LineWriter, next_line_number
from aorta.steps.event_steps import EventSteps
from aorta.steps.left_out import LeftOutLines
from aorta.steps.notes import (
    LEFT_OUT,
    RECORD_DTYPE,
    CallSequence,
    Frame,
    KernelChunk,
    LeftOutStep,
    LeftOutSteps,
    RecordedStep,
    ResolverSettings,
    encoded,
)
from aorta.steps.process import Closed, Reply, frame_bytes, packed, read_frame
from aorta.steps.told import Told

logger = logging.getLogger(__name__)

Listener = Callable[[StepRecord], None]
POLL_S = 0.05
"""Interval between two polls; each takes the interpreter lock from the training loop for a moment."""
KERNELS_POLL_S = 0.5
"""Interval between two polls where kernel records time the steps: the driver returns buffers every few steps,
and their ring holds those of half a second in any program."""
MANY_RECORDS = 1 << 16
"""Records in one poll from which on the next poll comes as soon as for events."""
LAST_KERNELS_S = 1.0
"""Limit of the wait for kernel records of the last step."""
ENDS_WITHIN_S = 1.0
"""Limit of the wait, once the recorder is closed, for ends of calls that a thread of the backend notes."""
MOST_TOGETHER = 256
"""Left-out steps that are sent together."""
MOST_BEHIND = 64
"""Limit of steps that are held back by a call whose end only a wait would tell, and nobody waits for it."""
PIPE_POLL_S = 0.2
"""Interval between two looks whether a process that takes nothing is still worth waiting for."""
SPARE_BYTES = 1 << 16
"""Bytes of UnwrittenSteps' file that may belong to safe steps, before the others are written anew."""

# Why a line that is written for a killed process lacks numbers:
KILLED = "its process was killed"
KILLED_BEFORE_READ = "its process was killed before its kernels were read"


class SendingThread:
    """Takes closed steps off the journal, in order, and sends their numbers, until the recorder is closed."""

    def __init__(
        self,
        journal: Journal,
        extractor: Extractor,
        kernels: KernelSource,
        sink: "RecordSink",
        telemetry: Callable[[], Telemetry],
        wants_records: Callable[[], bool],
        device: torch.device | None,
        beat: Callable[[], None] | None = None,
    ) -> None:
        """telemetry: returns the latest sample. wants_records: True while anybody listens for records. beat:
        called with every poll."""
        self._journal = journal
        self._extractor = extractor
        self._kernels = kernels
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
        self._told: DeviceRecord | None = None
        """The sample of the device that came with the left-out steps sent last."""
        self._thread = threading.Thread(target=self._run, name="aorta-sending", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Have the thread look at the journal now."""
        # It lowers the flag before it looks, so a raised one need not be raised again: that takes a lock.
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
        """Send what has come, sleep, and again; once the recorder is closed, without sleeping, to the end."""
        try:
            if self._device is not None:
                devices = accelerator()
                devices.set_device(self._device)
                devices.let_others_capture()
            while not self._abandoned:
                closing = self._closing.is_set()
                self._awake.clear()  # before the look: what comes during it wakes the thread again
                num_records = self._send_kernels()[0]
                self._drain()
                if self._beat is not None:
                    self._beat()
                if not closing:
                    is_rare = self._kernels.is_open and num_records < MANY_RECORDS
                    self._awake.wait(KERNELS_POLL_S if is_rare else POLL_S)
                elif self._journal.closed:  # the device has not passed them yet
                    time.sleep(0.002)
                else:
                    self._send_last_kernels()
                    return
        except Exception:
            # The instrument must not take training down: say it once, with the traceback.
            logger.exception("aorta: recording stopped, the rest of the run is not recorded")
            self._journal.stopped = True
            self._journal.closed.clear()

    def _send_kernels(self, closing: bool = False, forced: bool = False) -> tuple[int, bool]:
        """Send the kernel records that came; return their number, and True if all launched are there."""
        chunks = self._kernels.poll(closing, forced)
        for chunk in chunks:
            if chunk.records or chunk.names or chunk.complete_ns:
                self._sink.put_kernels(chunk)
        num_records = sum(len(chunk.records) for chunk in chunks) // RECORD_DTYPE.itemsize
        return num_records, not chunks or chunks[-1].complete_ns > 0

    def _send_last_kernels(self) -> None:
        """Wait for the records of the last step, but not long for what else the program has queued."""
        deadline = time.monotonic() + LAST_KERNELS_S
        while not self._send_kernels(closing=True)[1]:
            if time.monotonic() > deadline or self._abandoned:
                self._send_kernels(closing=True, forced=True)
                return
            time.sleep(0.005)

    def _drain(self) -> None:
        """Send the closed steps that are ready; a step that is not holds up those after it."""
        closed = self._journal.closed
        while closed and not self._abandoned:
            step = closed[0]
            if isinstance(step, LeftOutStep):
                self._send_left_out()
                continue
            is_late = len(closed) > MOST_BEHIND or time.monotonic() > self._ends_until_s
            if not self._extractor.ready(step, is_late):
                return
            raw = self._extractor.extract(step, self._telemetry())
            if raw is None:
                return
            for sequence in self._extractor.new_sequences:
                self._sink.put_sequence(sequence)
            self._extractor.new_sequences.clear()
            self._sink.put(raw, self._wants_records())
            closed.popleft()

    def _send_left_out(self) -> None:
        """Send the left-out steps at the journal's front together."""
        closed, telemetry = self._journal.closed, self._telemetry()
        steps: list[LeftOutStep] = []
        for step in islice(list(closed), MOST_TOGETHER):
            if not isinstance(step, LeftOutStep):
                break
            steps.append(step)
        told, self._told = self._told, telemetry.device
        sample = None if told is telemetry.device else telemetry.device
        self._sink.put_left_out(
            LeftOutSteps(steps, LEFT_OUT, sample, telemetry.not_measured), self._wants_records()
        )
        for _ in steps:
            closed.popleft()


class RecordSink(Protocol):
    """Takes the steps of one rank in order; their records go to the file and to the listener."""

    def put(self, step: RecordedStep, reply: bool) -> None:
        """Take a step. reply: the listener wants its record."""

    def put_left_out(self, steps: LeftOutSteps, reply: bool) -> None:
        """Take steps that the overhead left out."""

    def put_sequence(self, sequence: CallSequence) -> None:
        """Take collectives that steps from here on refer to."""

    def put_kernels(self, chunk: KernelChunk) -> None:
        """Take kernel records; they may come before the step that they time or after it."""

    def closing(self) -> None:
        """Let a process that writes go on if somebody stopped it: the run is about to end."""

    def close(self, timeout_s: float) -> int:
        """Write what is left, and return the number of lines that were lost."""
        ...


class ProcessSink:
    """Sends steps to `python -m aorta.steps.process`, which writes the file.

    If the training process is killed, the other one sees the end of its pipe and finishes the lines that it
    has. If the other one takes nothing (a disk that hangs), it holds up the thread that calls `put`, and
    `close` no longer than its limit; if somebody stopped it, it goes on when the run ends; if it was killed,
    the missing lines are counted.
    """

    def __init__(
        self,
        settings: ResolverSettings,
        path: Path,
        listener: Listener,
        state: Path | None = None,
        refuted: Callable[[], None] = lambda: None,
    ) -> None:
        """state: the rank's file, into which the other process writes how many lines it has written. refuted:
        called where the kernels of a step were not those of its collectives, in this order."""
        self._listener = listener
        self._refuted = refuted
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
        """Number of the process that writes."""
        return self._process.pid

    def put(self, step: RecordedStep, reply: bool) -> None:
        self._num_steps += 1
        self._send(Frame(step=step, reply=reply))

    def put_left_out(self, steps: LeftOutSteps, reply: bool) -> None:
        self._num_steps += len(steps.steps)
        self._send(Frame(left_out=steps, reply=reply))

    def put_sequence(self, sequence: CallSequence) -> None:
        self._send(Frame(sequence=sequence))

    def put_kernels(self, chunk: KernelChunk) -> None:
        self._send(Frame(kernels=chunk))

    @property
    def kernel_coverage(self) -> KernelCoverage | None:
        """Fit of collectives to kernels, after close; None where no step was timed by kernels."""
        return None if self._closed is None else self._closed.kernels

    def closing(self) -> None:
        """Continue the process, which somebody may have stopped: it has lines to write."""
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
        body = encoded(frame)
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
        """Write all of it into the pipe. Raises TimeoutError where the run ends and nothing is taken."""
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
        """Pass the process's answers on, on a thread of its own, until it closes its pipe."""
        assert self._process.stdout is not None
        decoder = msgspec.msgpack.Decoder(Reply)
        while (body := read_frame(self._process.stdout)) is not None:  # type: ignore[arg-type]
            reply = decoder.decode(body)
            if reply.record is not None:
                self._listener(reply.record)
            if reply.is_refuted:
                self._refuted()
            if reply.closed is not None:
                self._closed = reply.closed


class ThreadSink:
    """Resolves and writes where it is called. For CPUs, where no kernel waits for the interpreter lock."""

    def __init__(
        self, settings: ResolverSettings, writer: LineWriter, listener: Listener, tally: Tally | None = None
    ) -> None:
        self._event_steps = EventSteps(settings)
        self._left_out = LeftOutLines(settings, "host")
        self._told = Told()
        self._unix_minus_monotonic_ns = settings.unix_minus_monotonic_ns
        self._writer = writer
        self._listener = listener
        self._tally = tally

    def put(self, step: RecordedStep, reply: bool) -> None:
        record = self._event_steps.resolve(step)
        written = self._writer.write(self._told.rest_of(record))
        if self._tally is not None:
            self._tally.add(record, None if written else self._writer.why_lost)
        if reply:
            self._listener(record)

    def put_left_out(self, steps: LeftOutSteps, reply: bool) -> None:
        written = self._writer.write_bodies(self._left_out.bodies(steps))
        if self._tally is not None:
            lengths_ms = [(step.end_ns - step.start_ns) / 1e6 for step in steps.steps]
            last = steps.steps[-1]
            why_lost = None if written else self._writer.why_lost
            self._tally.add_lengths(
                last.global_step, lengths_ms, last.end_ns + self._unix_minus_monotonic_ns, why_lost
            )
        if reply:
            for record in self._left_out.records(steps):
                self._listener(record)

    def put_sequence(self, sequence: CallSequence) -> None:
        raise NotImplementedError("every collective of a CPU is seen")

    def put_kernels(self, chunk: KernelChunk) -> None:
        raise NotImplementedError("a CPU has no kernel records")

    def closing(self) -> None:
        """Do nothing: no other process writes."""

    def close(self, timeout_s: float) -> int:
        self._writer.close()
        if self._tally is not None:
            self._tally.close()
        return self._writer.num_lost


class UnwrittenSteps:
    """The file of a rank's closed steps whose lines are not written yet. Never raises OSError.

    A step is safe once the sink has taken it and the journal let go of it: its line is written, or the
    process that writes has its numbers, so that a SIGKILL of this one loses nothing. The file is for the
    others.
    """

    def __init__(self, path: Path, settings: ResolverSettings) -> None:
        self._path, self._settings = path, settings
        self._extractor = Extractor(HostClock())
        self._offset = self._num = 0
        self._unsafe: deque[bytes] = deque()
        """Packed steps that are not safe yet, oldest first; b"" for one that is not kept."""
        self._num_unsafe_bytes = 0
        self._descriptor: int | None = None
        with suppress(OSError):
            self._descriptor = regular_descriptor(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW)

    def keep(self, step: RecordedStep, num_before: int) -> None:
        """Keep a recorded step whose window has ended, unless a collective of it still goes on.

        num_before: steps before it that are not safe yet.
        """
        if self._descriptor is None:
            return
        try:
            raw = self._raw(step)
            data = b"" if raw is None else packed(self._num, self._settings, raw)
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

    def _raw(self, step: RecordedStep) -> RecordedStep | None:
        if self._settings.on_device:
            return host_only(step, KILLED_BEFORE_READ) if step.by_kernels else None
        if step.calls and not all(call.end or call.reason for call in step.calls):
            return None
        return self._extractor.extract(step, Telemetry(not_measured={"device": KILLED}))

    def close(self) -> None:
        """Remove the file: all steps are safe now."""
        if self._descriptor is not None:
            with suppress(OSError):
                os.close(self._descriptor)
            with suppress(OSError):
                self._path.unlink(missing_ok=True)
            self._descriptor = None
