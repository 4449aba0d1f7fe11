"""Reads a JAX (XLA) profiler trace in Chrome's format: <host>.trace.json.gz of jax.profiler.trace.

Its events have no category. Processes are named by metadata events: /device:GPU:0 and the like hold a thread
per stream (Stream #13(Compute), Stream #20(MemcpyD2H)), host threads hold the calls that launched the work
(same correlation id) and the steps (StepTraceAnnotation: step_num). Checked only on files made by the tests
after XLA's exporter.
"""

import re
from collections.abc import Sequence

import msgspec
import numpy as np

from aorta.errors import TraceError
from aorta.traces.assemble import UNLINKED, Activities, Category, StepMark, assemble, indexed
from aorta.traces.classify import COMM_RULES, CommRule, classifier
from aorta.traces.host_calls import KERNEL_LAUNCH
from aorta.traces.kineto.file import nanoseconds
from aorta.traces.model import RankTrace
from aorta.traces.names import rank_in_name

DEVICE = re.compile(r"/device:(?:GPU|ROCM):(\d{1,4})", re.IGNORECASE)
STREAM = re.compile(r"Stream #(\d+)")
COPY = re.compile(r"^(Memcpy|memcpy|Memset|memset)")


class JaxArgs(msgspec.Struct, gc=False):
    name: str | None = None
    correlation_id: int | str | None = None
    step_num: int | str | None = None


class JaxEvent(msgspec.Struct, gc=False):
    ph: str = ""
    pid: int | str | None = None
    tid: int | str | None = None
    name: str = ""
    ts: int | float = 0
    dur: int | float | None = None
    args: JaxArgs | None = None


class _Trace(msgspec.Struct):
    events: list[JaxEvent] = msgspec.field(name="traceEvents")


def parse_jax(
    data: bytes,
    location: str,
    *,
    rules: Sequence[CommRule] = COMM_RULES,
    device_index: str | None = None,
) -> RankTrace | None:
    """The trace; None where the bytes hold no work of a GPU that JAX wrote."""
    try:
        events = msgspec.json.decode(data, type=_Trace).events
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return trace_of_events(events, location, rules=rules, device_index=device_index)


def trace_of_events(
    events: Sequence[JaxEvent],
    location: str,
    *,
    rules: Sequence[CommRule] = COMM_RULES,
    device_index: str | None = None,
    base_ns: int = 0,
) -> RankTrace | None:
    """The trace of these events, whose times are after base_ns; None where none is work of a GPU."""
    named = {
        (kind, e.pid, e.tid if kind == "thread_name" else None): e.args.name
        for e in events
        if e.ph == "M" and e.args is not None and e.args.name is not None
        for kind in (e.name,)
    }
    device_of = {
        pid: match[1] for (kind, pid, _), name in named.items()
        if kind == "process_name" and (match := DEVICE.search(name))
    }  # fmt: skip
    stream_of = {
        (pid, tid): match[1] for (kind, pid, tid), name in named.items()
        if kind == "thread_name" and pid in device_of and (match := STREAM.search(name))
    }  # fmt: skip
    work = [e for e in events if e.ph == "X" and (e.pid, e.tid) in stream_of]
    if not work:
        return None
    host = [e for e in events if e.ph == "X" and e.pid not in device_of and e.args is not None]
    launches: dict[int | str | None, JaxEvent] = {
        e.args.correlation_id: e for e in host if e.args is not None and e.args.correlation_id is not None
    }
    correlation = [e.args.correlation_id if e.args is not None else None for e in work]
    launch_ns = np.full(len(work), UNLINKED)
    linked = [i for i, key in enumerate(correlation) if key in launches]
    launch_ns[linked] = nanoseconds([launches[correlation[i]].ts for i in linked], location)
    has_several_devices = len({device_of[e.pid] for e in work}) > 1
    labels = [
        f"{device_of[e.pid]}:{stream_of[e.pid, e.tid]}" if has_several_devices else stream_of[e.pid, e.tid]
        for e in work
    ]
    streams, stream = indexed(labels)
    names, name = indexed([e.name for e in work])
    start_ns = nanoseconds([e.ts for e in work], location)
    rank = rank_in_name(location)
    linked_ids = set(correlation)
    calls = [e for e in launches.values() if KERNEL_LAUNCH.match(e.name)]
    activities = Activities(
        start_ns=start_ns,
        end_ns=start_ns + nanoseconds([e.dur or 0 for e in work], location),
        category=np.array([_category(e.name) for e in work], dtype=np.int8),
        name=name,
        names=names,
        stream=stream,
        streams=streams,
        launch_ns=launch_ns,
        correlation=correlation,
        marks=_marks(host, location),
        num_launches=len(calls) if calls else None,
        dropped_ns=nanoseconds(
            [e.ts for e in calls if e.args is not None and e.args.correlation_id not in linked_ids], location
        ),
        is_timed=np.array([e.dur is not None for e in work]),
        base_ns=base_ns,
        notes=[] if rank is not None else ["the trace does not say its rank: 0 is assumed"],
    )
    return assemble(
        activities,
        location,
        classifier(tuple(rules)),
        source="kineto",
        rank=rank or 0,
        world_size=None,
        device=None,
        device_index=device_index,
    )


def _category(name: str) -> int:
    match = COPY.match(name)
    if match is None:
        return int(Category.KERNEL)
    return int(Category.MEMSET if match[1].lower() == "memset" else Category.COPY)


def _marks(host: Sequence[JaxEvent], location: str) -> list[StepMark]:
    rows = [e for e in host if e.args is not None and str(e.args.step_num or "").isdecimal()]
    rows += [e for e in host if e.args is not None and e.args.step_num == 0]
    rows = list({id(e): e for e in rows}.values())
    if any(len(str(e.args.step_num)) > 18 for e in rows if e.args is not None):
        raise TraceError(f"{location} has step numbers that no program counts to")
    start_ns = nanoseconds([e.ts for e in rows], location).tolist()
    length_ns = nanoseconds([e.dur or 0 for e in rows], location).tolist()
    return [
        StepMark(int(e.args.step_num or 0), 0, start, start + length)
        for e, start, length in zip(rows, start_ns, length_ns, strict=True)
        if e.args is not None
    ]
