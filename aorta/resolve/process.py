"""A process that turns raw steps into lines of the record file.

    python -m aorta.resolve.process FILE SETTINGS < frames > records

Beside a training loop in Python every millisecond of work in another thread is a millisecond
that the loop waits for the interpreter lock, and more where it launches kernels late because of
it. So on a GPU the work is done over here. Frames are MessagePack, each behind its length (four
bytes, little endian). When the pipe ends, for whatever reason, what came through it is written.
"""

import signal
import sys
from typing import BinaryIO

import msgspec

from aorta.records.schema import StepRecord
from aorta.records.writer import LineWriter
from aorta.resolve.calibration import Calibration
from aorta.resolve.raw import Frame, ResolverSettings
from aorta.resolve.resolver import Resolver

LENGTH_BYTES = 4


class Closed(msgspec.Struct, frozen=True, kw_only=True):
    """The process's last word."""

    num_written: int
    num_lost: int


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


def write_frame(stream: BinaryIO, body: bytes) -> None:
    rest = memoryview(len(body).to_bytes(LENGTH_BYTES, "little") + body)
    while rest:  # an unbuffered pipe may take a part
        rest = rest[stream.write(rest) :]
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


def serve(frames: BinaryIO, replies: BinaryIO, writer: LineWriter, settings: ResolverSettings) -> None:
    resolver = Resolver(settings)
    back = _Replies(replies)
    decoder = msgspec.msgpack.Decoder(Frame)
    while (body := read_frame(frames)) is not None:
        frame = decoder.decode(body)
        if frame.step is not None:
            record = resolver.resolve(frame.step)
            writer.write(record)
            if frame.reply:
                back.send(Reply(record=record))
        elif frame.calibration is not None:
            resolver.calibrate(msgspec.convert(frame.calibration, Calibration) if frame.calibration else None)
        elif frame.close:
            break
    writer.close()
    back.send(Reply(closed=Closed(num_written=writer.num_written, num_lost=writer.num_lost)))


def main() -> None:
    # The training process decides when this one ends, by closing the pipe.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    path, settings = sys.argv[1], msgspec.json.decode(sys.argv[2], type=ResolverSettings)
    # Unbuffered: a buffer that cannot be flushed into a broken pipe would complain at exit.
    with open(sys.stdout.fileno(), "wb", buffering=0, closefd=False) as replies:
        serve(sys.stdin.buffer, replies, LineWriter.append(path), settings)


if __name__ == "__main__":
    main()
