"""Brings closed steps out of the training process, to the one that writes their lines.

SendingThread takes steps off the journal once the device has passed them. Extractor reads their marks: one
question to the device per mark. A sink takes them. On a GPU that is ProcessSink, a pipe to a process of its
own, so that resolving and writing never hold the interpreter lock of the training loop; on a CPU ThreadSink
resolves them right there.
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
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch

from aorta.device.backend import accelerator
from aorta.device.marks import HostClock, MarkClock, NotPassedError
from aorta.record.host import Phases
from aorta.record.journal import Journal
from aorta.record.kernel_source import KernelSource
from aorta.record.scalars import read_scalars
from aorta.records.schema import DeviceRecord, KernelCoverage, StepRecord
from aorta.records.state import Tally
from aorta.records.writer import LineWriter, next_line_number
from aorta.steps.event_steps import EventSteps
from aorta.steps.left_out import left_out_records
from aorta.steps.notes import (
    LEFT_OUT,
    RECORD_DTYPE,
    CallSequence,
    CollectiveCall,
    Frame,
    LearnedCalls,
    LeftOutStep,
    LeftOutSteps,
    Mark,
    RecordedStep,
    ResolverSettings,
    encoded,
)
from aorta.steps.process import Reply, frame_bytes, read_frame
from aorta.steps.told import Told

logger = logging.getLogger(__name__)

Listener = Callable[[StepRecord], None]
POLL_S = 0.05
"""Interval between two polls where events time the steps, which are asked for and used again."""
RARE_POLL_S = 0.5
"""Interval where the clock of the host or kernel records do. Each poll takes the interpreter lock from the
training loop, and keeps it while other jobs have the core. The driver returns buffers every few steps, and
their ring holds those of half a second in any program."""
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
MOST_LIKES = 32
"""Sequences of collectives that are remembered as sent."""

# Why a line that is written for a killed process lacks numbers:
KILLED = "its process was killed"
KILLED_BEFORE_READ = "its process was killed before its kernels were read"


class Telemetry(msgspec.Struct, frozen=True, kw_only=True):
    """Readings of the device that go into a step's record beside its own numbers."""

    device: DeviceRecord | None = None
    not_measured: dict[str, str] = {}


class SendingThread:
    """Takes closed steps off the journal, in order, and sends their numbers, until the recorder is closed."""

    def __init__(
        self,
        journal: Journal,
        extractor: "Extractor",
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
                    is_rare = self._device is None or self._kernels.records is not None
                    is_rare = is_rare and num_records < MANY_RECORDS
                    self._awake.wait(RARE_POLL_S if is_rare else POLL_S)
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
        records = self._kernels.records
        chunks = [] if records is None else records.poll(closing, forced)
        for chunk in chunks:
            if chunk.records or chunk.names or chunk.complete_ns:
                self._sink.put(Frame(kernels=chunk))
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
            read = self._extractor.extract(step, self._telemetry())
            if read is None:
                return
            for sequence in self._extractor.new_sequences:
                self._sink.put(Frame(sequence=sequence))
            self._extractor.new_sequences.clear()
            self._sink.put(Frame(step=read, reply=self._wants_records()))
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
        left_out = LeftOutSteps(steps, LEFT_OUT, sample, telemetry.not_measured)
        self._sink.put(Frame(left_out=left_out, reply=self._wants_records()))
        for _ in steps:
            closed.popleft()


class RecordSink(Protocol):
    """Takes the steps of one rank in order; their records go to the file and to the listener."""

    def put(self, frame: Frame) -> None:
        """Take a step, or what belongs to steps. Kernel records may come before their step or after it."""

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
        self._closed: Reply | None = None
        """The last one, once the process has written everything."""
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

    def put(self, frame: Frame) -> None:
        if frame.left_out is not None:
            self._num_steps += len(frame.left_out.steps)
        self._num_steps += frame.step is not None
        self._send(frame)

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
                "aorta: the process that writes %s ended early; %d steps of it are missing",
                self._path,
                num_lost,
            )
            return num_lost
        return self._num_steps - (self._closed.num_written or 0)

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
                logger.warning("aorta: recording stopped: the process that writes %s %s", self._path, what)

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
            if reply.num_written is not None:
                self._closed = reply


class ThreadSink:
    """Resolves and writes where it is called. For CPUs, where no kernel waits for the interpreter lock."""

    def __init__(
        self, settings: ResolverSettings, writer: LineWriter, listener: Listener, tally: Tally | None = None
    ) -> None:
        self._event_steps = EventSteps(settings)
        self._settings = settings
        self._encode = msgspec.json.Encoder().encode
        self._told = Told()
        self._writer = writer
        self._listener = listener
        self._tally = tally

    def put(self, frame: Frame) -> None:
        if frame.left_out is not None:
            self._put_left_out(frame.left_out, frame.reply)
            return
        assert frame.step is not None, "every collective of a CPU is seen, and it has no kernel records"
        record = self._event_steps.resolve(frame.step)
        written = self._writer.write(self._told.rest_of(record))
        if self._tally is not None:
            self._tally.add(record, None if written else self._writer.why_lost)
        if frame.reply:
            self._listener(record)

    def _put_left_out(self, steps: LeftOutSteps, reply: bool) -> None:
        records = list(left_out_records(steps, self._settings, "host"))
        written = self._writer.write_bodies([self._encode(record) for record in records])
        if self._tally is not None:
            lengths_ms, last = [record.step_ms or 0.0 for record in records], records[-1]
            why_lost = None if written else self._writer.why_lost
            self._tally.add_lengths(last.global_step, lengths_ms, last.end_unix_ns, why_lost)
        if reply:
            for record in records:
                self._listener(record)

    def closing(self) -> None:
        """Do nothing: no other process writes."""

    def close(self, timeout_s: float) -> int:
        self._writer.close()
        if self._tally is not None:
            self._tally.close()
        return self._writer.num_lost


# -- reading a step's marks ------------------------------------------------------------------------------


class Extractor:
    """Reads the closed steps of one recorder, in order."""

    def __init__(
        self, clock: MarkClock, kernels: KernelSource | None = None, first_mark: Mark | None = None
    ) -> None:
        """first_mark: the run's first mark, from which EventSteps counts the device's time."""
        self._clock = clock
        self._kernels = kernels
        self._sequences: dict[int, tuple[list[CollectiveCall], int]] = {}
        """The latest calls that unseen steps were taken to have, by id, and the number that they have."""
        self._num_sequences = 0
        self.new_sequences: list[CallSequence] = []
        """Sequences that the steps extracted since refer to: to be sent before them, and cleared."""
        self._last_end: Mark | None = first_mark
        """End of the window before; this step starts there, unless the recorder was paused."""

    def ready(self, step: RecordedStep, is_late: bool) -> bool:
        """True once the step's window has ended on the device and every call has an end to ask for.

        Never blocks. Asks the device about one mark only; `extract` asks the others for their times and
        returns None where one is missing. is_late: wait no longer for ends that only a wait would tell.
        """
        assert step.window_end is not None
        if step.left_out is not None:
            return step.logged is None or self._clock.passed(step.logged)
        if step.by_kernels:
            assert self._kernels is not None
            return step.kernels_lost is not None or self._kernels.has_passed(step.window_end.number)
        if not self._clock.passed(step.window_end):
            return False
        for call in step.calls:
            if call.reason is None and call.end is None:
                if call.ends_unseen:  # only a wait in the same step would have told its end
                    call.reason = "not waited for within its step"
                elif not is_late:
                    return False
                else:
                    call.reason = "never waited for"
        return True

    def extract(self, step: RecordedStep, telemetry: Telemetry) -> RecordedStep | None:
        """Return a step that is ready as it is sent, its marks read; None while something in it goes on.

        Another thread may still be about to add a note: what is returned has those of this moment. Gives the
        step's marks back to their clock, to be used again.
        """
        if step.left_out is not None:
            if step.logged is not None and self._clock.is_device:
                self._clock.recycle([step.logged])
            return _sent(step, telemetry)
        calls = _with_phases(step)
        if step.by_kernels:
            learned = None if step.learned is None else self._learned(step.learned)
            is_unknown = step.is_unseen and learned is None
            return _sent(
                step,
                telemetry,
                calls=calls,
                learned=learned,
                num_calls=0 if is_unknown else None,
            )
        start, window_end = step.start, step.window_end
        assert start is not None
        assert window_end is not None
        timed = [call if _is_timed(call) else _without_times(call) for call in calls]
        waits, stalls = list(step.waits), list(step.stalls)
        final_waits = [msgspec.structs.replace(wait) for wait in step.final_waits]
        marks = [mark for call in timed for mark in (call.start, call.end)]
        marks += [wait.start for wait in waits]
        for stall in stalls:
            marks += (stall.start,) if stall.end is stall.start else (stall.start, stall.end)
        marks += [mark for wait in final_waits for mark in (wait.start, wait.end)]
        read = [window_end, *(mark for mark in (step.body_end, *marks) if mark is not None)]
        if (
            self._clock.is_device
        ):  # the host's marks tell their times: one may be of two steps, on two threads
            try:
                distances_ms = self._clock.distances_ms(start, read)
            except NotPassedError:
                return None
            for mark, ms in zip(read, distances_ms, strict=True):
                mark.ms = ms
        last_end, self._last_end = self._last_end, window_end
        gap_ms = None
        if last_end is not None and last_end is not start:
            (gap_ms,) = self._clock.distances_ms(last_end, [start])
        if self._clock.is_device:
            # The window's end is still needed: the next step starts there, or at a distance from it.
            passed_marks = [start, *read] if last_end is None else [start, *read, last_end]
            self._clock.recycle([mark for mark in passed_marks if mark is not window_end])
        return _sent(
            step,
            telemetry,
            calls=timed,
            waits=waits,
            stalls=stalls,
            final_waits=final_waits,
            gap_ms=gap_ms or 0.0,
            untimed=step.untimed or _unseen_waits(step),
        )

    def _learned(self, learned: LearnedCalls) -> LearnedCalls:
        """Return it as it is sent; the collectives go before it, unless they were sent."""
        calls = learned.calls
        if id(calls) not in self._sequences:
            if len(self._sequences) == MOST_LIKES:
                del self._sequences[next(iter(self._sequences))]
            self._num_sequences += 1
            self._sequences[id(calls)] = calls, self._num_sequences
            self.new_sequences.append(CallSequence(self._num_sequences, list(calls)))
        return LearnedCalls([], learned.first_numbers, self._sequences[id(calls)][1])


def reader_of_kept(on_device: bool) -> Callable[[RecordedStep], RecordedStep | None]:
    """Return what UnwrittenSteps asks for a closed step. It reads none that events time, and on a CPU none of
    which a collective still goes on."""
    extractor = Extractor(HostClock())

    def read(step: RecordedStep) -> RecordedStep | None:
        if on_device:
            return host_only(step, KILLED_BEFORE_READ) if step.by_kernels else None
        if step.calls and not all(call.end or call.reason for call in step.calls):
            return None
        return extractor.extract(step, Telemetry(not_measured={"device": KILLED}))

    return read


def host_only(step: RecordedStep, reason: str) -> RecordedStep:
    """Return what the host knows of a closed step that kernel records time. reason: why the rest is missing.

    The device is not asked, so scalars that are on their way from it are left out. Of the collectives only
    their number is kept.
    """
    scalars = {name: value for name, value in step.scalars.items() if isinstance(value, float)}
    missing = ("device", "collectives", *(name for name in step.scalars if name not in scalars))
    return _sent(
        step,
        scalars=scalars,
        host_notes=[],
        not_measured=dict.fromkeys(missing, reason),
        kernels_lost=reason,
        num_calls=len(step.calls if step.learned is None else step.learned.calls),
    )


def _sent(step: RecordedStep, telemetry: Telemetry | None = None, **read: Any) -> RecordedStep:
    """Return the step as it is sent: with what was read in place of what it holds, without other calls and
    waits, and without what is of use in its own process alone."""
    if telemetry is not None:
        read |= {"scalars": read_scalars(step.scalars), **msgspec.structs.asdict(telemetry)}
    sent: dict[str, Any] = {
        "calls": [], "waits": [], "stalls": [], "final_waits": [], "host_notes": list(step.host_notes),
        "lost_futures": [], "learned": None, "counts": None, "logged": None,
    }  # fmt: skip
    return msgspec.structs.replace(step, **sent | read)


def _with_phases(step: RecordedStep) -> list[CollectiveCall]:
    """Return the calls of this moment, in each the phase of the step."""
    calls = list(step.calls)
    if calls:
        phases = Phases(step)
        for call in calls:
            call.phase = phases.of_call(call)
    return calls


def _is_timed(call: CollectiveCall) -> bool:
    return call.reason is None and call.start is not None and call.end is not None


def _without_times(call: CollectiveCall) -> CollectiveCall:
    return msgspec.structs.replace(call, start=None, end=None)


def _unseen_waits(step: RecordedStep) -> str | None:
    """Say why it is not known how long compute stood still; None: every wait was seen."""
    unseen = [call for call in step.lost_futures if not (call.waited or call.backward_waited)]
    if not unseen:
        return None
    return (
        f"the futures of {len(unseen)} collectives ({unseen[0].op}) were taken, and nobody was seen to wait "
        "for them"
    )
