"""The Kineto file itself: typed decode of the few fields that are used, and its clock."""

import gzip
import zlib
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from aorta.errors import TraceError

EXACT_US = 2**53 / 1000
"""Above this a float of µs cannot hold whole nanoseconds."""


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


class Event(msgspec.Struct, gc=False):
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


class Trace(msgspec.Struct):
    events: list[Event] = msgspec.field(name="traceEvents")
    base_ns: int | None = msgspec.field(name="baseTimeNanoseconds", default=None)
    distributed: Distributed | None = msgspec.field(name="distributedInfo", default=None)
    devices: list[dict[str, Any]] = msgspec.field(name="deviceProperties", default_factory=list)


def read_bytes(path: Path | str) -> bytes:
    """The file's content, unpacked where it is gzip."""
    try:
        data = Path(path).read_bytes()
        return gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TraceError(f"{path} is a damaged gzip file: {error}") from error
    except OSError as error:
        raise TraceError(f"cannot read {path}: {error.strerror}") from error


def decode(data: bytes, where: str) -> Trace:
    try:
        return msgspec.json.decode(data, type=Trace)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        text = str(error)
        if "traceEvents" in text and "missing" in text:
            raise TraceError(f"{where} is JSON but not a Kineto trace: it has no traceEvents") from error
        raise TraceError(f"{where} is not a readable Kineto trace: {text}") from error


def nanoseconds(microseconds: list[int | float]) -> NDArray[np.int64]:
    """Exact for integers of any size and for floats below EXACT_US."""
    return np.array([1000 * t if type(t) is int else round(1000 * t) for t in microseconds], dtype=np.int64)


def is_coarse(events: list[Event]) -> bool:
    """Whether times are floats so large that nanoseconds are lost (a float of Unix µs: 0.25 µs)."""
    return any(type(e.ts) is float and e.ts > EXACT_US for e in events)
