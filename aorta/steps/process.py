"""The process that turns raw steps into lines of the record file, in the order in which the steps ran."""

import contextlib
import signal
import sys
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from aorta.records.columns.number_block import LineKey
from aorta.records.files import files_beside, kernels_name, steps_name, unwritten_name
from aorta.records.reader import read_kernel_names
from aorta.records.schema import KernelCoverage, KernelNames, LibraryCoverage, StepRecord
from aorta.records.state import Tally, read_states
from aorta.records.writer import LineWriter, write_json
from aorta.steps.calibration import Calibration
from aorta.steps.collective_steps import CollectiveSteps
from aorta.steps.event_steps import Resolver
from aorta.steps.kernel_steps import KernelSteps
from aorta.steps.raw import CollectiveChunk, Frame, KernelChunk, RawStep, ResolverSettings

_LATER = 8
"""Steps after one whose marks are looked at: a step waits for the next one or two as a rule."""
MOST_WAITING = 2048
"""Steps that wait for kernel records before the oldest is written without them."""


class StepQueue:
    """Resolves the steps of one rank in order; a step behind one that waits for its kernels waits too."""

    def __init__(self, settings: ResolverSettings, kernel_names: Sequence[str] = ()) -> None:
        """kernel_names: those that lines of earlier attempts refer to."""
        self._by_events = Resolver(settings)
        self._by_kernels = KernelSteps(settings, kernel_names)
        self._library = CollectiveSteps()
        self._unix_minus_monotonic_ns = settings.unix_minus_monotonic_ns
        self._waiting: deque[tuple[RawStep, bool]] = deque()

    @property
    def kernel_names(self) -> list[str]:
        return list(self._by_kernels.names)

    def kernel_coverage(self) -> KernelCoverage | None:
        """None where no step was timed by kernel records."""
        coverage = self._by_kernels.coverage()
        return coverage if coverage.num_steps else None

    def library_coverage(self) -> LibraryCoverage | None:
        """None where no step had events of the collective library."""
        return self._library.coverage()

    def calibrate(self, calibration: Calibration | None) -> None:
        self._by_events.calibrate(calibration)

    def put(self, step: RawStep, reply: bool) -> Iterator[tuple[StepRecord, bool]]:
        """The records that are ready now, each with whether somebody listens for it."""
        self._waiting.append((step, reply))
        return self._ready()

    def add_kernels(self, chunk: KernelChunk) -> Iterator[tuple[StepRecord, bool]]:
        """The records that are ready now."""
        self._by_kernels.add(chunk)
        return self._ready()

    def add_collectives(self, chunk: CollectiveChunk) -> Iterator[tuple[StepRecord, bool]]:
        """The records that are ready now."""
        self._library.add(chunk)
        return self._ready()

    def finish(self) -> Iterator[tuple[StepRecord, bool]]:
        """What is left, with the kernel records that have come."""
        while self._waiting:
            yield self._resolve_first()

    def _ready(self) -> Iterator[tuple[StepRecord, bool]]:
        while self._waiting:
            step = self._waiting[0][0]
            if len(self._waiting) <= MOST_WAITING and not self._is_complete(step):
                return
            yield self._resolve_first()

    def _resolve_first(self) -> tuple[StepRecord, bool]:
        step, reply = self._waiting.popleft()
        events = self._library.of_step(step)
        if step.kernel_marks is not None:
            record = self._by_kernels.resolve(step)
        else:
            record = self._by_events.resolve(step, self._library.exact(events))
        return self._library.with_events(
            record, record.start_unix_ns - self._unix_minus_monotonic_ns, events
        ), reply

    def _is_complete(self, step: RawStep) -> bool:
        """Whether everything that was recorded beside the step has come."""
        if not self._library.is_complete(step):
            return False
        if step.kernel_marks is None:
            return True
        later = [step, *(waiting for waiting, _ in islice(self._waiting, 1, _LATER))]
        return self._by_kernels.is_complete(step, later)


_HEAD_BYTES = 8
_MOST_BYTES = 1 << 28

Written = tuple[int, int]
"""rollbacks and global step of a line: they rise within an attempt."""


class _Packed(msgspec.Struct, array_like=True):
    number: int
    settings: dict[str, Any]
    step: RawStep


def packed(number: int, settings: ResolverSettings, step: RawStep) -> bytes:
    """Length, checksum, content. number: of the step among those that were kept."""
    body = msgspec.msgpack.encode((number, settings, step))
    return len(body).to_bytes(4, "little") + zlib.crc32(body).to_bytes(4, "little") + body


def unwritten_steps(
    path: Path, attempt: tuple[str | None, int] | None, last: Written | None
) -> list[StepRecord]:
    """The steps kept at path that follow the last line; none where nothing usable is there.

    of: run id and attempt that they must be of, None where there is no line to tell.
    """
    try:
        return list(_records(path, attempt, last))
    except (OSError, msgspec.MsgspecError, ValueError, ArithmeticError, LookupError, AssertionError):
        return []


def unwritten_after(path: Path, last: LineKey | StepRecord | None) -> list[StepRecord]:
    """The steps kept beside the rank's lines at path that follow `last`, the last one read.

    Empty while another process makes lines of the rank's steps: it has some that are neither kept nor lines.
    """
    beside = files_beside(path)
    if beside is None or not beside.unwritten.exists() or _has_writer(path):
        return []
    if last is None:
        return unwritten_steps(beside.unwritten, None, None)
    return unwritten_steps(beside.unwritten, (last.run_id, last.attempt), (last.rollbacks, last.global_step))


def _has_writer(path: Path) -> bool:
    """Whether another process writes the lines at path."""
    return any(
        state.has_writer and path.name == steps_name(rank) for rank, state in read_states(path.parent).items()
    )


def _records(
    path: Path, attempt: tuple[str | None, int] | None, last: Written | None
) -> Iterator[StepRecord]:
    # Here: nobody else who reads a run needs them, and hardly any run was killed.
    from aorta.steps.event_steps import Resolver
    from aorta.steps.kernel_steps import without_kernels

    resolver: Resolver | None = None
    for packed_step in _frames(path):
        settings = msgspec.convert(packed_step.settings, ResolverSettings)
        if attempt is not None and (settings.run_id, settings.attempt) != attempt:
            return
        if last is None or (packed_step.step.rollbacks, packed_step.step.global_step) > last:
            if packed_step.step.kernels_lost is not None:
                yield without_kernels(packed_step.step, settings, packed_step.step.kernels_lost)
                continue
            resolver = resolver or Resolver(settings)
            yield resolver.resolve(packed_step.step)


def _frames(path: Path) -> Iterator[_Packed]:
    """Those that follow each other: behind them lies what is left of earlier ones."""
    with open(path, "rb") as file:
        data = file.read(_MOST_BYTES)
    position, number = 0, None
    while len(data) >= position + _HEAD_BYTES:
        size, checksum = (int.from_bytes(data[position + i : position + i + 4], "little") for i in (0, 4))
        body = data[position + _HEAD_BYTES : position + _HEAD_BYTES + size]
        if len(body) < size or zlib.crc32(body) != checksum:
            return
        packed_step = msgspec.msgpack.decode(body, type=_Packed)
        if number is not None and packed_step.number != number + 1:
            return
        number = packed_step.number
        yield packed_step
        position += _HEAD_BYTES + size


LENGTH_BYTES = 4


class Closed(msgspec.Struct, frozen=True, kw_only=True):
    """The process's last word."""

    num_written: int
    num_lost: int
    kernels: KernelCoverage | None = None
    """None where no step was timed by kernel records."""
    library: LibraryCoverage | None = None
    """None where no step had events of the collective library."""


class Reply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    record: StepRecord | None = None
    closed: Closed | None = None


def read_frame(stream: BinaryIO) -> bytes | None:
    """The next frame, or None where the stream ends (a part of a frame is no frame)."""
    head = stream.read(LENGTH_BYTES)
    if len(head) < LENGTH_BYTES:
        return None
    size = int.from_bytes(head, "little")
    body = stream.read(size)
    return body if len(body) == size else None


def frame_bytes(body: bytes) -> bytes:
    return len(body).to_bytes(LENGTH_BYTES, "little") + body


def write_frame(stream: BinaryIO, body: bytes) -> None:
    unsent = memoryview(frame_bytes(body))
    while unsent:  # an unbuffered pipe may take a part
        unsent = unsent[stream.write(unsent) :]
    stream.flush()


class _Replies:
    """The way back. If the training process is gone, its steps are still written."""

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

    def __init__(self, path: Path, earlier: Sequence[str]) -> None:
        """earlier: what the file holds of attempts before this one."""
        self._path = path
        self._num_written = len(earlier)

    def write(self, names: Sequence[str]) -> None:
        if len(names) > self._num_written:
            self._num_written = len(names)
            with contextlib.suppress(OSError):  # a full disk: the lines have classes all the same
                write_json(self._path, KernelNames(names=list(names)))


def serve(
    frames: BinaryIO,
    replies: BinaryIO,
    writer: LineWriter,
    settings: ResolverSettings,
    names_path: Path,
    tally: Tally | None = None,
    unwritten: Path | None = None,
) -> None:
    """unwritten: the file of steps that a killed training process had not sent yet."""
    earlier = read_kernel_names(names_path)
    steps = StepQueue(settings, earlier)
    back, names = _Replies(replies), _Names(names_path, earlier)
    decoder = msgspec.msgpack.Decoder(Frame)

    def write(ready: Iterable[tuple[StepRecord, bool]]) -> None:
        for record, reply in ready:
            if record.kernels is not None:
                names.write(steps.kernel_names)  # first: no line refers to a name that is not there
            written = writer.write(record)
            if tally is not None:
                tally.add(record, None if written else writer.why_lost)
            if reply:
                back.send(Reply(record=record))

    last_sent: tuple[int, int] | None = None
    is_closed = False
    while (body := read_frame(frames)) is not None:
        frame = decoder.decode(body)
        if frame.step is not None:
            last_sent = (frame.step.rollbacks, frame.step.global_step)
            write(steps.put(frame.step, frame.reply))
        elif frame.kernels is not None:
            write(steps.add_kernels(frame.kernels))
        elif frame.collectives is not None:
            write(steps.add_collectives(frame.collectives))
        elif frame.calibration is not None:
            steps.calibrate(msgspec.convert(frame.calibration, Calibration) if frame.calibration else None)
        elif frame.close:
            is_closed = True
            break
    write(steps.finish())
    if not is_closed and unwritten is not None:
        attempt = (settings.run_id, settings.attempt)
        write((record, False) for record in unwritten_steps(unwritten, attempt, last_sent))
        with contextlib.suppress(OSError):
            unwritten.unlink(missing_ok=True)
    if tally is not None:
        tally.close()  # the time at which the training process ended, if it did
    writer.close()
    closed = Closed(
        num_written=writer.num_written,
        num_lost=writer.num_lost,
        kernels=steps.kernel_coverage(),
        library=steps.library_coverage(),
    )
    back.send(Reply(closed=closed))


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
        writer.max_bytes = settings.max_bytes
        unwritten = Path(path).with_name(unwritten_name(settings.rank))
        serve(sys.stdin.buffer, replies, writer, settings, names_path, tally, unwritten)


if __name__ == "__main__":
    main()
