"""Decodes a Kineto file: the few fields that are used, into typed events, and its clock into nanoseconds.

decode is for timelines (kineto.py); decode_for_graph also has what a dependency graph needs
(aorta.why.replay).
"""

import re
from collections.abc import Iterable, Sequence
from typing import Any, Union

import msgspec
import numpy as np
from numpy.typing import NDArray

from aorta.errors import TraceError

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


class KinetoEvent(msgspec.Struct, gc=False, tag_field="ph", tag="X"):
    """A complete event: one with a duration. The other phases tell nothing that is used."""

    cat: str | None = None
    name: str = ""
    pid: int | str | None = None
    tid: int | str | None = None
    ts: int | float = 0
    dur: int | float | None = None
    args: Args | None = None


class GraphArgs(Args, gc=False):
    """Args, and what a dependency graph needs beside a timeline."""

    grid: Any = None
    block: Any = None
    wait_on_stream: Any = None
    event: Any = msgspec.field(name="wait_on_cuda_event_id", default=None)
    recorded: Any = msgspec.field(name="wait_on_cuda_event_record_corr_id", default=None)


class GraphEvent(KinetoEvent, gc=False, tag_field="ph", tag="X"):
    """A complete event with GraphArgs."""

    args: GraphArgs | None = None


class Begin(msgspec.Struct, gc=False, tag_field="ph", tag="B"):
    """First half of a complete event; the next End of the same thread that is not taken is the second."""

    cat: str | None = None
    name: str = ""
    pid: int | str | None = None
    tid: int | str | None = None
    ts: int | float = 0
    args: Args | None = None


class End(msgspec.Struct, gc=False, tag_field="ph", tag="E"):
    pid: int | str | None = None
    tid: int | str | None = None
    ts: int | float = 0


OTHER_PHASES = (Begin, End, *(
    msgspec.defstruct(f"Phase_{phase}", [], tag_field="ph", tag=phase, gc=False)
    for phase in ("i", "I", "C", "b", "n", "e", "s", "t", "f", "P", "N", "O", "D", "M", "V", "v",
                  "R", "c", "(", ")")
))  # fmt: skip
"""Begin, End, and an empty struct for each other phase: nothing of those events is built."""


class AnyEvent(msgspec.Struct, gc=False):
    """An event of a file that has events without a phase, or with one that Chrome does not know."""

    ph: str = ""
    cat: str | None = None
    name: str = ""
    pid: int | str | None = None
    tid: int | str | None = None
    ts: int | float = 0
    dur: int | float | None = None
    args: Args | None = None


class AnyGraphEvent(AnyEvent, gc=False):
    args: GraphArgs | None = None


class Distributed(msgspec.Struct):
    rank: int | None = None
    world_size: int | None = None
    pg_config: list[Any] | None = None
    nccl_version: Any = None


class Trace(msgspec.Struct):
    events: list[Union[(KinetoEvent, *OTHER_PHASES)]] = msgspec.field(name="traceEvents")  # type: ignore[valid-type]
    base_ns: int | None = msgspec.field(name="baseTimeNanoseconds", default=None)
    distributed: Distributed | None = msgspec.field(name="distributedInfo", default=None)
    devices: list[dict[str, Any]] = msgspec.field(name="deviceProperties", default_factory=list)
    cuda_runtime_version: Any = None
    cuda_driver_version: Any = None
    hip_runtime_version: Any = None
    hip_driver_version: Any = None


class GraphTrace(Trace):
    """A Trace whose events have GraphArgs."""

    events: list[Union[(GraphEvent, *OTHER_PHASES)]] = msgspec.field(name="traceEvents")  # type: ignore[valid-type]


class AnyTrace(msgspec.Struct):
    events: list[AnyEvent] = msgspec.field(name="traceEvents")
    base_ns: int | None = msgspec.field(name="baseTimeNanoseconds", default=None)
    distributed: Distributed | None = msgspec.field(name="distributedInfo", default=None)
    devices: list[dict[str, Any]] = msgspec.field(name="deviceProperties", default_factory=list)


class AnyGraphTrace(AnyTrace):
    events: list[AnyGraphEvent] = msgspec.field(name="traceEvents")  # type: ignore[assignment]


_DECODER = msgspec.json.Decoder(Trace)
_GRAPH_DECODER = msgspec.json.Decoder(GraphTrace)
NOT_A_NUMBER = re.compile(rb'"(?:[^"\\]|\\.)*"|NaN|-?Infinity')
"""Strings, which stay, and numbers that Python's json writes though JSON has none of them, which become
null."""


def decode(data: bytes, location: str) -> Trace:
    """Trace whose events are complete ones alone; pairs of begin and end are made complete."""
    return _complete(data, location, False)


def decode_for_graph(data: bytes, location: str) -> GraphTrace:
    """decode, with GraphArgs."""
    return _complete(data, location, True)  # type: ignore[return-value]


def _complete(data: bytes, location: str, for_graph: bool) -> Trace:
    data = data.rstrip(b"\0 \t\r\n")  # what a full disk or a preallocated file leaves
    try:
        trace = _decode(data, for_graph)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        text = str(error)
        if "traceEvents" in text and "missing" in text:
            raise TraceError(f"{location} is JSON but not a Kineto trace: it has no traceEvents") from error
        raise TraceError(f"{location} is not a readable Kineto trace: {text}") from error
    kinds = list(map(type, trace.events))
    complete = GraphEvent if for_graph else KinetoEvent
    paired = _paired(trace.events, complete) if Begin in kinds else []
    trace.events = [e for e, kind in zip(trace.events, kinds, strict=True) if kind is complete] + paired
    return trace


def _decode(data: bytes, for_graph: bool) -> Trace:
    decoder: msgspec.json.Decoder[Any] = _GRAPH_DECODER if for_graph else _DECODER
    try:
        return decoder.decode(data)  # type: ignore[no-any-return]
    except msgspec.ValidationError:
        return _decode_any(data, for_graph)
    except msgspec.DecodeError:
        if b"NaN" not in data and b"Infinity" not in data:
            raise
    data = NOT_A_NUMBER.sub(lambda match: match[0] if match[0][:1] == b'"' else b"null", data)
    try:
        return decoder.decode(data)  # type: ignore[no-any-return]
    except msgspec.ValidationError:
        return _decode_any(data, for_graph)


def _paired(events: Iterable[Any], complete: type[KinetoEvent]) -> list[KinetoEvent]:
    """Begins with their ends, which nest in a thread. A begin without an end has no duration."""
    open_events: dict[tuple[Any, Any], list[KinetoEvent]] = {}
    paired: list[KinetoEvent] = []
    for e in events:
        if type(e) is Begin:
            event = complete(cat=e.cat, name=e.name, pid=e.pid, tid=e.tid, ts=e.ts, args=e.args)
            open_events.setdefault((e.pid, e.tid), []).append(event)
            paired.append(event)
        elif type(e) is End and open_events.get((e.pid, e.tid)):
            event = open_events[e.pid, e.tid].pop()
            event.dur = e.ts - event.ts
    return paired


def _decode_any(data: bytes, for_graph: bool) -> Trace:
    loose: AnyTrace = msgspec.json.decode(data, type=AnyGraphTrace if for_graph else AnyTrace)
    kinds: dict[str, Any] = {"X": GraphEvent if for_graph else KinetoEvent, "B": Begin, "E": End}
    events = []
    for e in loose.events:
        if e.ph in kinds:
            values = {name: getattr(e, name) for name in kinds[e.ph].__struct_fields__}
            events.append(kinds[e.ph](**values))
    kind = GraphTrace if for_graph else Trace
    return kind(events=events, base_ns=loose.base_ns, distributed=loose.distributed, devices=loose.devices)


def nanoseconds(microseconds: Sequence[int | float], location: str) -> NDArray[np.int64]:
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
            exact: NDArray[np.int64] = scaled.astype(np.int64)
            return exact
        return np.array([1000 * t if type(t) is int else round(1000 * t) for t in microseconds], np.int64)
    except (OverflowError, ValueError) as error:
        raise TraceError(f"{location} has times that no clock gives: {error}") from error


def is_coarse(microseconds: Sequence[int | float]) -> bool:
    """True where times are floats so large that nanoseconds are lost (a float of Unix µs: 0.25 µs)."""
    return float in set(map(type, microseconds)) and max(microseconds) > EXACT_US
