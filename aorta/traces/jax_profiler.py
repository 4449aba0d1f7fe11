"""Reads the XPlane format of jax.profiler.trace (<host>.xplane.pb)."""

import re
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np

from aorta.errors import TraceError
from aorta.traces.assemble import UNLINKED, Activities, Category, StepMark, assemble, indexed
from aorta.traces.classify import COMM_RULES, CommRule, classifier
from aorta.traces.host_calls import KERNEL_LAUNCH
from aorta.traces.kineto_file import nanoseconds
from aorta.traces.model import RankTrace, known_rank, listed_names, rank_in_name

XPLANE_SUFFIX = ".xplane.pb"
DEVICE = re.compile(r"/device:(?:GPU|ROCM):(\d{1,4})", re.IGNORECASE)
STREAM = re.compile(r"Stream #(\d+)")
COPY = re.compile(r"^(Memcpy|memcpy|Memset|memset)")
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
"""Wire types of a field."""
CORRELATION, STEP = "correlation_id", "step_num"
"""Names of the stats that are used."""
LARGEST_VARINT = 10
"""Bytes of the longest varint."""
_Fields = Iterator[tuple[int, Any]]


class _Args(msgspec.Struct, gc=False):
    name: str | None = None
    correlation_id: int | str | None = None
    step_num: int | str | None = None


class _Event(msgspec.Struct, gc=False):
    ph: str = ""
    pid: int | str | None = None
    tid: int | str | None = None
    name: str = ""
    ts: int | float = 0
    dur: int | float | None = None
    args: _Args | None = None


def parse_xplane(
    data: bytes, location: str, *, rules: Sequence[CommRule] = COMM_RULES, **options: Any
) -> RankTrace:
    """Trace of one host in XPlane; options as in parse_kineto.

    Raises TraceError where the bytes are no XSpace, or hold no work of a GPU.
    """
    try:
        planes = [
            list(_fields(memoryview(plane))) for field, plane in _fields(memoryview(data)) if field == 1
        ]
        base_ns = min(_starts_ns(planes), default=0)
        events = [event for i, plane in enumerate(planes) for event in _events(plane, i, base_ns)]
        names = [_text(value) for plane in planes for field, value in plane if field == 2]
    except (IndexError, ValueError, TypeError, OverflowError) as error:
        raise TraceError(f"{location} is a damaged XPlane trace, or none: {error}") from error
    trace = _trace_of_events(events, location, rules=rules, base_ns=base_ns, **options)
    if trace is None:
        has = f"its planes are {listed_names(names)}" if names else "it has no planes"
        devices = " without streams" if any(DEVICE.search(name) for name in names) else ""
        raise TraceError(f"{location} holds no GPU activity{devices}: {has}; TPUs and CPUs are not read")
    return trace


def _trace_of_events(
    events: Sequence[_Event],
    location: str,
    *,
    rules: Sequence[CommRule] = COMM_RULES,
    device_index: str | None = None,
    base_ns: int = 0,
) -> RankTrace | None:
    """Trace of these events, whose times count from base_ns; None where none is work of a GPU."""
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
    launches: dict[int | str | None, _Event] = {
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
    notes: list[str] = []
    rank = known_rank((rank_in_name(location),), notes)
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
        notes=notes,
    )
    return assemble(
        activities,
        location,
        classifier(tuple(rules)),
        source="kineto",
        rank=rank,
        world_size=None,
        device=None,
        device_index=device_index,
    )


def _category(name: str) -> int:
    match = COPY.match(name)
    if match is None:
        return int(Category.KERNEL)
    return int(Category.MEMSET if match[1].lower() == "memset" else Category.COPY)


def _marks(host: Sequence[_Event], location: str) -> list[StepMark]:
    rows = [e for e in host if e.args is not None and str(e.args.step_num or "").isdecimal()]
    rows += [e for e in host if e.args is not None and e.args.step_num == 0]  # which `or` takes for none
    if any(len(str(e.args.step_num)) > 18 for e in rows if e.args is not None):
        raise TraceError(f"{location} has step numbers that no program counts to")
    start_ns = nanoseconds([e.ts for e in rows], location).tolist()
    length_ns = nanoseconds([e.dur or 0 for e in rows], location).tolist()
    return [
        StepMark(int(e.args.step_num or 0), 0, start, start + length)
        for e, start, length in zip(rows, start_ns, length_ns, strict=True)
        if e.args is not None
    ]


# ---- XPlane: protocol buffers, read without their schema -----------------------------------------


def _starts_ns(planes: Sequence[Sequence[tuple[int, Any]]]) -> Iterator[int]:
    """Start of every line of the planes, to which its events' times are relative."""
    for plane in planes:
        for line in (value for field, value in plane if field == 3):
            starts = [_signed(value) for field, value in _fields(line) if field == 3]
            yield from starts[-1:]


def _events(plane: Sequence[tuple[int, Any]], pid: int, base_ns: int) -> Iterator[_Event]:
    """A plane (a device, or the host) as events of Chrome's form: names of its lines, then their events."""
    name = "".join(_text(value) for field, value in plane if field == 2)
    event_names = dict(_table(value) for field, value in plane if field == 4)
    stat_names = dict(_table(value) for field, value in plane if field == 5)
    used = {number: stat for number, stat in stat_names.items() if stat in (CORRELATION, STEP)}
    yield _Event(ph="M", pid=pid, name="process_name", args=_Args(name=name))
    for tid, line in enumerate(value for field, value in plane if field == 3):
        line_name, shown, start_ns, rows = "", "", base_ns, []
        for field, value in _fields(line):
            if field == 2:
                line_name = _text(value)
            elif field == 11:
                shown = _text(value)
            elif field == 3:
                start_ns = _signed(value)
            elif field == 4:
                rows.append(value)
        args = _Args(name=line_name or shown)
        yield _Event(ph="M", pid=pid, tid=tid, name="thread_name", args=args)
        for row in rows:
            yield _event(row, pid, tid, (start_ns - base_ns) / 1000, event_names, used)


def _event(
    row: memoryview, pid: int, tid: int, start_us: float, names: dict[int, str], used: dict[int, str]
) -> _Event:
    """An XEvent of a line that starts at start_us; used: names of the stats that are read, by number."""
    kind, offset_ps, duration_ps = 0, 0, None
    stats: dict[str, int | str] = {}
    for field, value in _fields(row):
        if field == 1:
            kind = value
        elif field == 2:
            offset_ps = _signed(value)
        elif field == 3:
            duration_ps = _signed(value)
        elif field == 4 and used:
            stat = dict(_fields(value))
            number = next((stat[i] for i in (3, 4) if i in stat), None)
            if (name := used.get(stat.get(1, 0))) is not None and isinstance(number, int):
                stats[name] = number
    return _Event(
        ph="X",
        pid=pid,
        tid=tid,
        name=names.get(kind, ""),
        ts=start_us + offset_ps / 1e6,
        dur=None if duration_ps is None else duration_ps / 1e6,
        args=_Args(correlation_id=stats.get(CORRELATION), step_num=stats.get(STEP)) if stats else None,
    )


def _table(entry: memoryview) -> tuple[int, str]:
    """Number and name of an entry of event_metadata or stat_metadata."""
    row = dict(_fields(entry))
    content = dict(_fields(row[2])) if 2 in row else {}
    number = row.get(1, content.get(1, 0))
    return number, _text(content.get(2, b""))


def _fields(data: memoryview) -> _Fields:
    """Numbers and values of a message's fields. Raises ValueError for bytes that are no message."""
    place, end = 0, len(data)
    while place < end:
        key, place = _varint(data, place)
        kind = key & 7
        value: Any
        if kind == VARINT:
            value, place = _varint(data, place)
        elif kind == BYTES:
            length, place = _varint(data, place)
            if length > end - place:
                raise ValueError("a field is longer than the file")
            value = data[place : place + length]
            place += length
        elif kind in (FIXED64, FIXED32):
            width = 8 if kind == FIXED64 else 4
            if width > end - place:
                raise ValueError("a field is longer than the file")
            value = None  # floating-point numbers: none is used
            place += width
        else:
            raise ValueError(f"fields of kind {kind} do not exist")
        yield key >> 3, value


def _varint(data: memoryview, place: int) -> tuple[int, int]:
    """Value of the varint at this place, and the place behind it."""
    value = shift = 0
    for _ in range(LARGEST_VARINT):
        byte = data[place]
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, place
        shift += 7
    raise ValueError("a number has no end")


def _signed(value: int) -> int:
    """The varint as a signed number (int64)."""
    return value - (1 << 64) if value >= 1 << 63 else value


def _text(value: Any) -> str:
    return bytes(value).decode("utf-8", "replace")
