"""Where raw steps go: a resolver in this thread, or one in a process of its own."""

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
from pathlib import Path
from typing import Protocol

import msgspec

from aorta.records.schema import KernelCoverage, LibraryCoverage, StepRecord
from aorta.records.state import Tally
from aorta.records.writer import LineWriter, next_line_number
from aorta.steps.calibration import Calibration
from aorta.steps.event_steps import Resolver
from aorta.steps.process import Closed, Reply, frame_bytes, read_frame
from aorta.steps.raw import CollectiveChunk, Frame, KernelChunk, RawStep, ResolverSettings

logger = logging.getLogger(__name__)

Listener = Callable[[StepRecord], None]

POLL_S = 0.2
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
                takes_more.poll(POLL_S * 1e3)

    def _read(self) -> None:
        assert self._process.stdout is not None
        decoder = msgspec.msgpack.Decoder(Reply)
        while (body := read_frame(self._process.stdout)) is not None:  # type: ignore[arg-type]
            reply = decoder.decode(body)
            if reply.record is not None:
                self._listener(reply.record)
            if reply.closed is not None:
                self._closed = reply.closed
