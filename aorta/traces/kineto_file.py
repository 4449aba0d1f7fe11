"""Decodes a Kineto file: the few fields that are used, into typed events, and its clock into nanoseconds.

Who reads it says which arguments of events it needs: Args for a timeline (kineto.py), GraphArgs for a
dependency graph (aorta.why.replay), TensorArgs for operators (inventory.py).
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Any, Generic, TypeVar, Union

import msgspec
import numpy as np

from aorta.errors import TraceError
from aorta.timeline.arrays import Ints

EXACT_US = 2**53 / 1000
"""Largest time in µs of which a float holds whole nanoseconds."""


class Args(msgspec.Struct, gc=False):  # a trace has 1e5 of them, and no cycles
    """Arguments of an event."""

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
    group_size: Any = msgspec.field(name="Group size", default=None)
    external_id_2021: int | str | None = msgspec.field(name="external id", default=None)


class GraphArgs(Args, gc=False):
    """Args, and what a dependency graph needs beside a timeline."""

    grid: Any = None
    block: Any = None
    wait_on_stream: Any = None
    event: Any = msgspec.field(name="wait_on_cuda_event_id", default=None)
    recorded: Any = msgspec.field(name="wait_on_cuda_event_record_corr_id", default=None)


class TensorArgs(Args, gc=False):
    """Args, and what operators tell of their inputs."""

    dims: Any = msgspec.field(name="Input Dims", default=None)
    types: Any = msgspec.field(name="Input type", default=None)
    strides: Any = msgspec.field(name="Input Strides", default=None)


A = TypeVar("A", bound=Args, covariant=True)


class End(msgspec.Struct, gc=False, tag_field="ph", tag="E"):
    pid: int | str | None = None
    tid: int | str | None = None
    ts: int | float = 0


class Begin(End, Generic[A], gc=False, tag="B"):
    """First half of a complete event; the next End of the same thread that is not taken is the second."""

    cat: str | None = None
    name: str = ""
    args: A | None = None


class Event(Begin[A], Generic[A], gc=False, tag="X"):
    """A complete event: one with a duration. The other phases tell nothing that is used."""

    dur: int | float | None = None


OTHER_PHASES = (Begin[A], End, *(  # type: ignore[valid-type]
    msgspec.defstruct(f"Phase_{phase}", [], tag_field="ph", tag=phase, gc=False)
    for phase in ("i", "I", "C", "b", "n", "e", "s", "t", "f", "P", "N", "O", "D", "M", "V", "v",
                  "R", "c", "(", ")")
))  # fmt: skip
"""Begin, End, and an empty struct for each other phase: nothing of those events is built."""


class AnyEvent(msgspec.Struct, Generic[A], gc=False):
    """An event of a file that has events without a phase, or with one that Chrome does not know."""

    ph: str = ""
    cat: str | None = None
    name: str = ""
    pid: int | str | None = None
    tid: int | str | None = None
    ts: int | float = 0
    dur: int | float | None = None
    args: A | None = None


KinetoEvent = Event[Args]
GraphEvent = Event[GraphArgs]
TensorEvent = Event[TensorArgs]


class Distributed(msgspec.Struct):
    rank: int | None = None
    world_size: int | None = None
    pg_config: list[Any] | None = None
    nccl_version: Any = None


class Trace(msgspec.Struct, Generic[A]):
    events: list[Union[(Event[A], *OTHER_PHASES)]] = msgspec.field(name="traceEvents")  # type: ignore[valid-type]
    base_ns: int | None = msgspec.field(name="baseTimeNanoseconds", default=None)
    distributed: Distributed | None = msgspec.field(name="distributedInfo", default=None)
    devices: list[dict[str, Any]] = msgspec.field(name="deviceProperties", default_factory=list)
    cuda_runtime_version: Any = None
    cuda_driver_version: Any = None
    hip_runtime_version: Any = None
    hip_driver_version: Any = None


class AnyTrace(msgspec.Struct, Generic[A]):
    events: list[AnyEvent[A]] = msgspec.field(name="traceEvents")
    base_ns: int | None = msgspec.field(name="baseTimeNanoseconds", default=None)
    distributed: Distributed | None = msgspec.field(name="distributedInfo", default=None)
    devices: list[dict[str, Any]] = msgspec.field(name="deviceProperties", default_factory=list)


NOT_A_NUMBER = re.compile(rb'"(?:[^"\\]|\\.)*"|NaN|-?Infinity')
"""Strings, which stay, and numbers that Python's json writes though JSON has none of them, which become
null."""


def decode(data: bytes, location: str, args: type[A]) -> Trace[A]:
    """Trace whose events are complete ones alone, with these arguments; pairs of begin and end are made
    complete. Raises TraceError where the bytes are no Kineto trace."""
    data = data.rstrip(b"\0 \t\r\n")  # what a full disk or a preallocated file leaves
    try:
        trace = _decode(data, args)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        text = str(error)
        if "traceEvents" in text and "missing" in text:
            raise TraceError(f"{location} is JSON but not a Kineto trace: it has no traceEvents") from error
        raise TraceError(f"{location} is not a readable Kineto trace: {text}") from error
    kinds = list(map(type, trace.events))
    paired: list[Event[A]] = _paired(trace.events) if Begin in kinds else []
    trace.events = [e for e, kind in zip(trace.events, kinds, strict=True) if kind is Event] + paired
    return trace


@cache
def _decoder(args: type[A]) -> "msgspec.json.Decoder[Trace[A]]":
    return msgspec.json.Decoder(Trace[args])  # type: ignore[valid-type]


def _decode(data: bytes, args: type[A]) -> Trace[A]:
    try:
        return _decoder(args).decode(data)
    except msgspec.ValidationError:
        return _decode_any(data, args)
    except msgspec.DecodeError:
        if b"NaN" not in data and b"Infinity" not in data:
            raise
        plain = NOT_A_NUMBER.sub(lambda match: match[0] if match[0][:1] == b'"' else b"null", data)
        if plain == data:  # they are in strings alone
            raise
    return _decode(plain, args)


def _paired(events: Iterable[Any]) -> list[Event[A]]:
    """Begins with their ends, which nest in a thread. A begin without an end has no duration."""
    open_events: dict[tuple[Any, Any], list[Event[A]]] = {}
    paired: list[Event[A]] = []
    for e in events:
        if type(e) is Begin:
            event = Event(cat=e.cat, name=e.name, pid=e.pid, tid=e.tid, ts=e.ts, args=e.args)
            open_events.setdefault((e.pid, e.tid), []).append(event)
            paired.append(event)
        elif type(e) is End and open_events.get((e.pid, e.tid)):
            event = open_events[e.pid, e.tid].pop()
            event.dur = e.ts - event.ts
    return paired


def _decode_any(data: bytes, args: type[A]) -> Trace[A]:
    loose: AnyTrace[A] = msgspec.json.decode(data, type=AnyTrace[args])  # type: ignore[valid-type]
    kinds: dict[str, Any] = {"X": Event, "B": Begin, "E": End}
    events = []
    for e in loose.events:
        if e.ph in kinds:
            values = {name: getattr(e, name) for name in kinds[e.ph].__struct_fields__}
            events.append(kinds[e.ph](**values))
    return Trace(events=events, base_ns=loose.base_ns, distributed=loose.distributed, devices=loose.devices)


def nanoseconds(microseconds: Sequence[int | float], location: str) -> Ints:
    """Times in whole ns; exact for integers of any size and for floats below EXACT_US."""
    try:
        kinds = set(map(type, microseconds))
        if kinds == {int}:
            integers = np.array(microseconds, dtype=np.int64)
            if len(integers) and max(abs(int(integers.min())), abs(int(integers.max()))) > 2**62 // 1000:
                raise OverflowError(f"{max(microseconds, key=abs)} µs")
            return integers * 1000
        if kinds == {float}:
            with np.errstate(over="ignore"):
                scaled = np.rint(1000 * np.array(microseconds))
            if not (np.abs(scaled) <= 2**62).all():
                raise OverflowError(f"{max(microseconds, key=abs)} µs")
            exact: Ints = scaled.astype(np.int64)
            return exact
        return np.array([1000 * t if type(t) is int else round(1000 * t) for t in microseconds], np.int64)
    except (OverflowError, ValueError) as error:
        raise TraceError(f"{location} has times that no clock gives: {error}") from error


def intervals_ns(events: Sequence[Event[Any]], location: str) -> tuple[Ints, Ints]:
    """Starts and ends of the events; one without a length ends where it starts."""
    start_ns = nanoseconds([e.ts for e in events], location)
    return start_ns, start_ns + nanoseconds([e.dur or 0 for e in events], location)


def timed(events: Sequence[Event[A]], location: str) -> Iterator[tuple[Event[A], int, int]]:
    """The events, each with its start and end in ns."""
    start_ns, end_ns = intervals_ns(events, location)
    return zip(events, start_ns.tolist(), end_ns.tolist(), strict=True)


def is_coarse(microseconds: Sequence[int | float]) -> bool:
    """True where times are floats so large that nanoseconds are lost (a float of Unix µs: 0.25 µs)."""
    return float in set(map(type, microseconds)) and max(microseconds) > EXACT_US
