"""The Kineto file itself: typed decode of the few fields that are used, and its clock."""

import gc
import gzip
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Union

import msgspec
import numpy as np
from numpy.typing import NDArray

from aorta.errors import TraceError

EXACT_US = 2**53 / 1000
"""Above this a float of µs cannot hold whole nanoseconds."""
LARGEST_BYTES = 1 << 34
"""A file that unpacks to more is taken for a bomb."""


class Args(msgspec.Struct, gc=False):  # a trace has 1e5 of them, and no cycles
    correlation: int | str | None = None
    stream: int | str | None = None
    device: int | str | None = None
    external_id: int | str | None = msgspec.field(name="External id", default=None)
    collective: Any = msgspec.field(name="Collective name", default=None)
    in_nelems: Any = msgspec.field(name="In msg nelems", default=None)
    out_nelems: Any = msgspec.field(name="Out msg nelems", default=None)
    dtype: Any = None
    group: Any = msgspec.field(name="Process Group Name", default=None)
    ranks: Any = msgspec.field(name="Process Group Ranks", default=None)


class Event(msgspec.Struct, gc=False, tag_field="ph", tag="X"):
    """A complete event: one with a duration. The other phases tell nothing that is used."""

    cat: str | None = None
    name: str = ""
    pid: int | str | None = None
    tid: int | str | None = None
    ts: int | float = 0
    dur: int | float | None = None
    args: Args | None = None


OTHER_PHASES = tuple(
    msgspec.defstruct(f"Phase_{phase}", [], tag_field="ph", tag=phase, gc=False)
    for phase in ("B", "E", "i", "I", "C", "b", "n", "e", "s", "t", "f", "P", "N", "O", "D", "M", "V", "v",
                  "R", "c", "(", ")")
)  # fmt: skip
"""Empty structs: nothing of those events is built."""


class AnyEvent(msgspec.Struct, gc=False):
    """Where a file has events without a phase or with one that Chrome does not know."""

    ph: str = ""
    cat: str | None = None
    name: str = ""
    pid: int | str | None = None
    tid: int | str | None = None
    ts: int | float = 0
    dur: int | float | None = None
    args: Args | None = None


class Distributed(msgspec.Struct):
    rank: int | None = None
    world_size: int | None = None
    pg_config: list[Any] | None = None
    nccl_version: Any = None


class Trace(msgspec.Struct):
    events: list[Union[(Event, *OTHER_PHASES)]] = msgspec.field(name="traceEvents")  # type: ignore[valid-type]
    base_ns: int | None = msgspec.field(name="baseTimeNanoseconds", default=None)
    distributed: Distributed | None = msgspec.field(name="distributedInfo", default=None)
    devices: list[dict[str, Any]] = msgspec.field(name="deviceProperties", default_factory=list)
    cuda_runtime_version: Any = None
    cuda_driver_version: Any = None
    hip_runtime_version: Any = None
    hip_driver_version: Any = None


class AnyTrace(msgspec.Struct):
    events: list[AnyEvent] = msgspec.field(name="traceEvents")
    base_ns: int | None = msgspec.field(name="baseTimeNanoseconds", default=None)
    distributed: Distributed | None = msgspec.field(name="distributedInfo", default=None)
    devices: list[dict[str, Any]] = msgspec.field(name="deviceProperties", default_factory=list)


def read_bytes(path: Path | str) -> bytes:
    """The file's content, unpacked where it is gzip."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise TraceError(f"cannot read {path}: {error.strerror}") from error
    return unpack(data, str(path))


def unpack(data: bytes, where: str) -> bytes:
    """The content of gzip, or data as they are."""
    if data[:2] != b"\x1f\x8b":
        return data
    parts = []
    room = LARGEST_BYTES
    try:
        while data:
            unpacker = zlib.decompressobj(31)
            parts.append(unpacker.decompress(data, room))
            room -= len(parts[-1])
            if not unpacker.eof:
                reason = "it unpacks to more than 16 GiB" if room <= 0 else "it is cut off"
                raise TraceError(f"{where} is a damaged gzip file: {reason}")
            data = unpacker.unused_data.lstrip(b"\0")  # some writers pad
    except (zlib.error, gzip.BadGzipFile) as error:
        raise TraceError(f"{where} is a damaged gzip file: {error}") from error
    except MemoryError as error:
        raise TraceError(f"{where} unpacks to more than the memory here") from error
    return parts[0] if len(parts) == 1 else b"".join(parts)


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """A decode makes 1e5 objects without cycles; looking at them takes longer than making them."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


_DECODER = msgspec.json.Decoder(Trace)


def decode(data: bytes, where: str) -> Trace:
    """events holds the complete ones alone."""
    try:
        try:
            trace = _DECODER.decode(data)
        except msgspec.ValidationError:
            trace = _decode_any(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        text = str(error)
        if "traceEvents" in text and "missing" in text:
            raise TraceError(f"{where} is JSON but not a Kineto trace: it has no traceEvents") from error
        raise TraceError(f"{where} is not a readable Kineto trace: {text}") from error
    trace.events = [e for e in trace.events if type(e) is Event]
    return trace


def _decode_any(data: bytes) -> Trace:
    loose = msgspec.json.decode(data, type=AnyTrace)
    events = [
        Event(cat=e.cat, name=e.name, pid=e.pid, tid=e.tid, ts=e.ts, dur=e.dur, args=e.args)
        for e in loose.events
        if e.ph == "X"
    ]
    return Trace(events=events, base_ns=loose.base_ns, distributed=loose.distributed, devices=loose.devices)


def nanoseconds(microseconds: Sequence[int | float], where: str) -> NDArray[np.int64]:
    """Exact for integers of any size and for floats below EXACT_US."""
    try:
        kinds = set(map(type, microseconds))
        if kinds == {int}:
            whole = np.array(microseconds, dtype=np.int64)
            if len(whole) and max(abs(int(whole.min())), abs(int(whole.max()))) > 2**62 // 1000:
                raise OverflowError(f"{max(microseconds, key=abs)} µs")
            return whole * 1000
        if kinds == {float}:
            with np.errstate(over="ignore"):
                scaled = np.rint(1000 * np.array(microseconds))
            if not (np.abs(scaled) <= 2**62).all():
                raise OverflowError(f"{max(microseconds, key=abs)} µs")
            exact: NDArray[np.int64] = scaled.astype(np.int64)
            return exact
        return np.array([1000 * t if type(t) is int else round(1000 * t) for t in microseconds], np.int64)
    except (OverflowError, ValueError) as error:
        raise TraceError(f"{where} has times that no clock gives: {error}") from error


def is_coarse(microseconds: Sequence[int | float]) -> bool:
    """Whether times are floats so large that nanoseconds are lost (a float of Unix µs: 0.25 µs)."""
    return float in set(map(type, microseconds)) and max(microseconds) > EXACT_US
