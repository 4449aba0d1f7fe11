"""A process that turns raw steps into lines of the record file.

    python -m aorta.steps.process FILE SETTINGS [STATE] < frames > records

Beside a training loop in Python every millisecond of work in another thread is a millisecond
that the loop waits for the interpreter lock, and more where it launches kernels late because of
it. So on a GPU the work is done over here. Frames are MessagePack, each behind its length (four
bytes, little endian). When the pipe ends, for whatever reason, what came through it is written, and where
the training process was killed also what the host knew of the steps that had not come.
"""

import contextlib
import signal
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec

from aorta.records.files import kernels_name, unwritten_name
from aorta.records.reader import read_kernel_names
from aorta.records.schema import KernelCoverage, KernelNames, LibraryCoverage, StepRecord
from aorta.records.state import Tally
from aorta.records.writer import LineWriter, write_json
from aorta.steps.calibration import Calibration
from aorta.steps.raw import Frame, ResolverSettings
from aorta.steps.step_queue import StepQueue
from aorta.steps.unwritten import unwritten_steps

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
