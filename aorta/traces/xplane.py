"""Reads JAX's XPlane traces (<host>.xplane.pb of jax.profiler.trace): protocol buffers, without a library.

Planes of devices (/device:GPU:0) have a line per stream, the host's a line per thread; what an event is
called and what its numbers mean is in tables of the plane. Events become those of JAX's Chrome format, which
this capture also has: with whole nanoseconds here, and without that exporter's limit of a million events.
Planes of TPUs have no streams and are not read.

Source: xplane.proto of OpenXLA (tsl/profiler/protobuf), for the numbers of fields. Checked on captures of JAX
on a CPU, which have no device plane, and on files that the tests make.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from aorta.errors import TraceError
from aorta.traces.classify import COMM_RULES, CommRule
from aorta.traces.jax_trace import DEVICE, JaxArgs, JaxEvent, trace_of_events
from aorta.traces.model import RankTrace
from aorta.traces.names import listed_names

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
SUFFIX = ".xplane.pb"
CORRELATION, STEP = "correlation_id", "step_num"
LARGEST_VARINT = 10
"""Bytes."""

Fields = Iterator[tuple[int, Any]]


def parse_xplane(
    data: bytes, location: str, *, rules: Sequence[CommRule] = COMM_RULES, **options: Any
) -> RankTrace:
    """The trace of one host. options as in parse_kineto. TraceError where the bytes are no XSpace, or hold no
    work of a GPU."""
    try:
        planes = [
            list(_fields(memoryview(plane))) for field, plane in _fields(memoryview(data)) if field == 1
        ]
        base_ns = min(_starts_ns(planes), default=0)
        events = [event for i, plane in enumerate(planes) for event in _events(plane, i, base_ns)]
        names = [_text(value) for plane in planes for field, value in plane if field == 2]
    except (IndexError, ValueError, TypeError, OverflowError) as error:
        raise TraceError(f"{location} is a damaged XPlane trace, or none: {error}") from error
    trace = trace_of_events(events, location, rules=rules, base_ns=base_ns, **options)
    if trace is None:
        has = f"its planes are {listed_names(names)}" if names else "it has no planes"
        devices = " without streams" if any(DEVICE.search(name) for name in names) else ""
        raise TraceError(f"{location} holds no GPU activity{devices}: {has}; TPUs and CPUs are not read")
    return trace


def _fields(data: memoryview) -> Fields:
    """Numbers and values of a message's fields. ValueError for what is none."""
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
    """int64 of a varint."""
    return value - (1 << 64) if value >= 1 << 63 else value


def _text(value: Any) -> str:
    return bytes(value).decode("utf-8", "replace")


def _starts_ns(planes: Sequence[Sequence[tuple[int, Any]]]) -> Iterator[int]:
    for plane in planes:
        for line in (value for field, value in plane if field == 3):
            starts = [_signed(value) for field, value in _fields(line) if field == 3]
            yield from starts[-1:]


def _events(plane: Sequence[tuple[int, Any]], pid: int, base_ns: int) -> Iterator[JaxEvent]:
    name = "".join(_text(value) for field, value in plane if field == 2)
    event_names = dict(_table(value) for field, value in plane if field == 4)
    stat_names = dict(_table(value) for field, value in plane if field == 5)
    used = {number: stat for number, stat in stat_names.items() if stat in (CORRELATION, STEP)}
    yield JaxEvent(ph="M", pid=pid, name="process_name", args=JaxArgs(name=name))
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
        args = JaxArgs(name=line_name or shown)
        yield JaxEvent(ph="M", pid=pid, tid=tid, name="thread_name", args=args)
        for row in rows:
            yield _event(row, pid, tid, (start_ns - base_ns) / 1000, event_names, used)


def _event(
    row: memoryview, pid: int, tid: int, start_us: float, names: dict[int, str], used: dict[int, str]
) -> JaxEvent:
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
    return JaxEvent(
        ph="X",
        pid=pid,
        tid=tid,
        name=names.get(kind, ""),
        ts=start_us + offset_ps / 1e6,
        dur=None if duration_ps is None else duration_ps / 1e6,
        args=JaxArgs(correlation_id=stats.get(CORRELATION), step_num=stats.get(STEP)) if stats else None,
    )


def _table(entry: memoryview) -> tuple[int, str]:
    """Number and name of an entry of event_metadata or stat_metadata."""
    row = dict(_fields(entry))
    content = dict(_fields(row[2])) if 2 in row else {}
    number = row.get(1, content.get(1, 0))
    return number, _text(content.get(2, b""))
