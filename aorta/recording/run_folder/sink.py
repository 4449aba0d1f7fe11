"""Where raw steps go: a resolver in this thread, or one in a process of its own."""

import contextlib
import logging
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec

from aorta.records.schema import KernelCoverage, LibraryCoverage, StepRecord
from aorta.records.state import Tally
from aorta.records.writer import LineWriter
from aorta.steps.calibration import Calibration
from aorta.steps.collective_chunk import CollectiveChunk
from aorta.steps.kernel_chunk import KernelChunk
from aorta.steps.process import Closed, Reply, read_frame, write_frame
from aorta.steps.raw import Frame, RawStep, ResolverSettings
from aorta.steps.resolver import Resolver

logger = logging.getLogger(__name__)

Listener = Callable[[StepRecord], None]


class RecordSink(Protocol):
    """Takes the raw steps of one rank in order; records go to the file and to the listener."""

    def put(self, step: RawStep, reply: bool) -> None:
        """reply: the listener wants the record."""

    def put_kernels(self, chunk: KernelChunk) -> None:
        """Kernel records for the steps that they time; they may come before the step or after it."""

    def put_collectives(self, chunk: CollectiveChunk) -> None:
        """Events of the collective library for the steps that they belong to, likewise."""

    def calibrate(self, calibration: Calibration | None) -> None: ...

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

    def close(self, timeout_s: float) -> int:
        self._writer.close()
        if self._tally is not None:
            self._tally.close()
        return self._writer.num_lost


class ProcessSink:
    """Sends steps to `python -m aorta.steps.process`, which writes the file.

    The process sees the end of its pipe if this one is killed, and finishes the lines it has got.
    """

    def __init__(
        self, settings: ResolverSettings, path: Path, listener: Listener, state: Path | None = None
    ) -> None:
        """state: of the rank, for what was written of its steps."""
        self._listener = listener
        self._encoder = msgspec.msgpack.Encoder()
        self._closed: Closed | None = None
        self._num_sent = 0
        self._num_unsent = 0
        self._process = subprocess.Popen(
            [
                sys.executable, "-m", "aorta.steps.process",
                str(path), msgspec.json.encode(settings).decode(), *([] if state is None else [str(state)]),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # a Ctrl-C at the terminal is for the training processes
        )  # fmt: skip
        self._reader = threading.Thread(target=self._read, name="aorta-records", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """Of the process that writes."""
        return self._process.pid

    def put(self, step: RawStep, reply: bool) -> None:
        if self._send(Frame(step=step, reply=reply)):
            self._num_sent += 1
        else:
            self._num_unsent += 1

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

    def close(self, timeout_s: float) -> int:
        self._send(Frame(close=True))
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._reader.join(timeout_s)
        try:
            self._process.wait(max(1.0, timeout_s))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._closed is None:
            logger.warning("the process that writes the records ended early; lines are missing")
            return self._num_unsent
        return self._num_unsent + self._closed.num_lost

    def _send(self, frame: Frame) -> bool:
        assert self._process.stdin is not None
        try:
            write_frame(self._process.stdin, self._encoder.encode(frame))  # type: ignore[arg-type]
        except (OSError, ValueError):
            if self._num_unsent == 0:
                logger.warning("recording stopped: the process that writes the records is gone")
            return False
        return True

    def _read(self) -> None:
        assert self._process.stdout is not None
        decoder = msgspec.msgpack.Decoder(Reply)
        while (body := read_frame(self._process.stdout)) is not None:  # type: ignore[arg-type]
            reply = decoder.decode(body)
            if reply.record is not None:
                self._listener(reply.record)
            if reply.closed is not None:
                self._closed = reply.closed
