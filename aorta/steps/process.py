"""The process that turns the steps of one rank into lines of its record file, in their order.

The recorder (aorta.record.sending) starts it and writes frames to its standard input; `serve` is its loop. It
outlives a training process that is killed: what that had sent, or kept beside the lines for this case
(aorta.steps.unwritten), is still written.
"""

import contextlib
import os
import signal
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import BinaryIO

import msgspec

from aorta.records.deaths import Bystander
from aorta.records.files import kernels_name, unwritten_name
from aorta.records.reader import read_kernel_names
from aorta.records.schema import KernelCoverage, KernelNames, StepRecord
from aorta.records.state import Tally
from aorta.records.writer import LineWriter, write_sealed
from aorta.steps.event_steps import EventSteps
from aorta.steps.kernel_steps import KernelSteps
from aorta.steps.left_out import left_out_records
from aorta.steps.notes import (
    CallSequence,
    Frame,
    KernelChunk,
    LeftOutSteps,
    RecordedStep,
    ResolverSettings,
    decoded,
)
from aorta.steps.record import left_out_record
from aorta.steps.told import Told
from aorta.steps.unwritten import unwritten_steps
from aorta.timeline.types import Source

MOST_WAITING = 2048
"""Steps that may wait for kernel records; beyond that the oldest is written without them."""

MOST_SEQUENCES = 64
"""Sequences of collectives that are kept: more than the recorder refers to (record/sending.py)."""

_LATER = 8
"""Steps whose marks may show that a step is complete: as a rule the next one or two do."""

LENGTH_BYTES = 4
"""Bytes of a frame's length, before its content."""


class Reply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A message to the training process: a record that it asked for, or the end."""

    record: StepRecord | None = None
    is_refuted: bool = False
    """The kernels of a step were not those of its collectives, in this order."""
    num_written: int | None = None
    """In the last reply: number of lines that were written."""
    kernels: KernelCoverage | None = None
    """In the last reply, where kernel records timed a step: how well the sources fit together."""


def main() -> None:
    # The training process decides when this one ends, by closing the pipe.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    path, settings = sys.argv[1], msgspec.json.decode(sys.argv[2], type=ResolverSettings)
    # Unbuffered: a buffer that cannot be flushed into a broken pipe would complain at exit.
    with open(sys.stdout.fileno(), "wb", buffering=0, closefd=False) as replies:
        names_path = Path(path).with_name(kernels_name(settings.rank))
        tally = Tally(Path(sys.argv[3]), settings.attempt) if len(sys.argv) > 3 else None
        writer = LineWriter.append(path, with_columns=True)
        unwritten = Path(path).with_name(unwritten_name(settings.rank))
        bystander = Bystander(os.getppid(), settings.rank)
        serve(sys.stdin.buffer, replies, writer, settings, names_path, tally, unwritten, bystander)


def serve(
    frames: BinaryIO,
    replies: BinaryIO,
    writer: LineWriter,
    settings: ResolverSettings,
    names_path: Path,
    tally: Tally | None = None,
    unwritten: Path | None = None,
    bystander: Bystander | None = None,
) -> None:
    """Write the steps of all frames until the stream ends; then say so.

    names_path: the file of kernel names. tally: keeps sums of all steps. unwritten: the journal, read and
    removed where the training process ended without closing. bystander: of the training process.
    """
    earlier = read_kernel_names(names_path)
    steps = StepQueue(settings, earlier)
    answers, names = _Replies(replies), _Names(names_path, settings.run_id, earlier)
    told = Told()

    def write(ready: Iterable[tuple[StepRecord, bool]]) -> None:
        for record, reply in ready:
            if record.kernels is not None:
                names.write(steps.kernel_names)  # before the line, which must not refer to a missing name
            written = writer.write(told.rest_of(record))
            if tally is not None:
                tally.add(record, None if written else writer.why_lost)
            if reply:
                answers.send(Reply(record=record))

    last_sent: tuple[int, int] | None = None
    is_closed = False
    num_refuted = 0
    while (body := read_frame(frames)) is not None:
        frame = decoded(body, Frame)
        if frame.step is not None:
            last_sent = (frame.step.rollbacks, frame.step.global_step)
            write(steps.put(frame.step, frame.reply))
        elif frame.left_out is not None:
            last_sent = (frame.left_out.steps[-1].rollbacks, frame.left_out.steps[-1].global_step)
            write(steps.put(frame.left_out, frame.reply))
        elif frame.sequence is not None:
            steps.add_sequence(frame.sequence)
        elif frame.kernels is not None:
            write(steps.add_kernels(frame.kernels))
        elif frame.close:
            is_closed = True
            break
        if steps.num_refuted > num_refuted:
            num_refuted = steps.num_refuted
            answers.send(Reply(is_refuted=True))
    ending = None if is_closed or bystander is None else bystander.ending()
    write(steps.finish())
    if not is_closed and unwritten is not None:  # killed: its last steps may be in the journal alone
        attempt = (settings.run_id, settings.attempt)
        write((record, False) for record in unwritten_steps(unwritten, attempt, last_sent))
        with contextlib.suppress(OSError):  # its steps are lines now
            unwritten.unlink(missing_ok=True)
    if tally is not None:
        tally.close(ending)  # the time at which the training process ended, if it did
    writer.close()
    answers.send(Reply(num_written=writer.num_written, kernels=steps.kernel_coverage()))


class _Replies:
    """Sends replies to the training process, until that is gone: its steps are still written."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._encoder = msgspec.msgpack.Encoder()
        self._broken = False

    def send(self, reply: Reply) -> None:
        if self._broken:
            return
        try:
            write_frame(self._stream, self._encoder.encode(reply))
        except OSError:
            self._broken = True


class _Names:
    """Writes the names of kernels beside the lines that refer to them, whenever there are new ones."""

    def __init__(self, path: Path, run_id: str | None, earlier: Sequence[str]) -> None:
        """earlier: names that the file holds from attempts before this one."""
        self._path, self._run_id = path, run_id
        self._num_written = len(earlier)

    def write(self, names: Sequence[str]) -> None:
        if len(names) > self._num_written:
            self._num_written = len(names)
            with contextlib.suppress(OSError):  # a full disk: the lines have classes all the same
                write_sealed(self._path, KernelNames(names=list(names), run_id=self._run_id))


class StepQueue:
    """Resolves the steps of one rank in the order in which they ran.

    A step is resolved when everything recorded beside it has come. Kernel records come later than
    the step, in chunks; a step that waits for them holds back all that follow.
    """

    def __init__(self, settings: ResolverSettings, kernel_names: Sequence[str] = ()) -> None:
        """kernel_names: names that lines of earlier attempts refer to."""
        self._settings = settings
        self._source: Source = "events" if settings.on_device else "host"
        """Of the step that was recorded last."""
        self._by_events = EventSteps(settings)
        self._by_kernels = KernelSteps(settings, kernel_names)
        self._waiting: deque[tuple[RecordedStep | LeftOutSteps, bool]] = deque()
        self._sequences: dict[int, CallSequence] = {}

    @property
    def num_refuted(self) -> int:
        """Steps so far whose kernels were not those of their collectives, in this order."""
        return self._by_kernels.num_refuted

    @property
    def kernel_names(self) -> list[str]:
        return list(self._by_kernels.names)

    def kernel_coverage(self) -> KernelCoverage | None:
        """None where no step was timed by kernel records."""
        coverage = self._by_kernels.coverage()
        return coverage if coverage.num_steps else None

    def put(self, step: RecordedStep | LeftOutSteps, reply: bool) -> Iterator[tuple[StepRecord, bool]]:
        """Take a step, or neighbours that were left out; yields what is ready now, each with its `reply`."""
        if isinstance(step, RecordedStep) and step.learned is not None:
            step = self._sequences[step.learned.number].of_step(step)
        self._waiting.append((step, reply))
        return self._ready()

    def add_sequence(self, sequence: CallSequence) -> None:
        """Take collectives that steps which come from now on refer to."""
        self._sequences[sequence.number] = sequence
        self._sequences.pop(sequence.number - MOST_SEQUENCES, None)

    def add_kernels(self, chunk: KernelChunk) -> Iterator[tuple[StepRecord, bool]]:
        """Take kernel records; yields the records that are ready now."""
        self._by_kernels.add(chunk)
        return self._ready()

    def finish(self) -> Iterator[tuple[StepRecord, bool]]:
        """Resolve the steps that still wait, with the kernel records that have come."""
        while self._waiting:
            yield from self._resolve_first()

    def _ready(self) -> Iterator[tuple[StepRecord, bool]]:
        while self._waiting:
            step = self._waiting[0][0]
            if len(self._waiting) <= MOST_WAITING and not self._is_complete(step):
                return
            yield from self._resolve_first()

    def _resolve_first(self) -> Iterator[tuple[StepRecord, bool]]:
        step, reply = self._waiting.popleft()
        if isinstance(step, LeftOutSteps):
            for record in left_out_records(step, self._settings, self._source):
                yield record, reply
        elif step.left_out is not None:
            yield left_out_record(step, self._settings, self._source), reply
        else:
            self._source = "kernels" if step.by_kernels else "events"
            yield (self._by_kernels if step.by_kernels else self._by_events).resolve(step), reply

    def _is_complete(self, step: RecordedStep | LeftOutSteps) -> bool:
        """Return True when everything recorded beside the step has come."""
        if isinstance(step, LeftOutSteps) or step.left_out is not None or not step.by_kernels:
            return True
        waiting = (one for one, _ in islice(self._waiting, 1, _LATER))
        later = [step, *(one for one in waiting if isinstance(one, RecordedStep))]
        return self._by_kernels.is_complete(step, later)


# -- frames in the pipe --------------------------------------------------------------------------------


def read_frame(stream: BinaryIO) -> bytes | None:
    """The next frame's content; None where the stream ends, also within a frame."""
    head = stream.read(LENGTH_BYTES)
    if len(head) < LENGTH_BYTES:
        return None
    size = int.from_bytes(head, "little")
    body = stream.read(size)
    return body if len(body) == size else None


def frame_bytes(body: bytes) -> bytes:
    """A frame: its length in LENGTH_BYTES, then its content."""
    return len(body).to_bytes(LENGTH_BYTES, "little") + body


def write_frame(stream: BinaryIO, body: bytes) -> None:
    unsent = memoryview(frame_bytes(body))
    while unsent:  # an unbuffered pipe may take a part
        unsent = unsent[stream.write(unsent) :]
    stream.flush()


if __name__ == "__main__":
    main()
