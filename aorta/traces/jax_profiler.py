"""Reads the XPlane format of jax.profiler.trace (<host>.xplane.pb).

Fields by their numbers in xplane.proto of TensorFlow: XSpace 1 planes; XPlane 2 name, 3 lines,
4 event_metadata, 5 stat_metadata; XLine 2 name, 3 timestamp_ns, 4 events, 11 display_name; XEvent
1 metadata_id, 2 offset_ps, 3 duration_ps, 4 stats; XStat 1 metadata_id, 3 uint64_value, 4 int64_value.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from aorta.errors import TraceError
from aorta.traces.assemble import (
    UNLINKED,
    Activities,
    Category,
    StepMark,
    assemble,
    indexed,
    nanoseconds,
    stream_labels,
)
from aorta.traces.classify import COMM_RULES, CommRule, classifier
from aorta.traces.host_calls import KERNEL_LAUNCH
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
LARGEST_STEP = 10**18
_Fields = Iterator[tuple[int, Any]]


class _Event(NamedTuple):
    name: str
    start_ns: int
    """Behind the earliest line of all planes."""
    length_ns: int | None
    stats: Mapping[str, int]


class _Line(NamedTuple):
    name: str
    events: list[_Event]


class _Plane(NamedTuple):
    """A device, or the host."""

    name: str
    lines: list[_Line]


def parse_xplane(
    data: bytes,
    location: str,
    *,
    rules: Sequence[CommRule] = COMM_RULES,
    device_index: str | None = None,
) -> RankTrace:
    """Trace of one host. Raises TraceError where the bytes are no XSpace, or hold no work of a GPU."""
    try:
        messages = [
            list(_fields(memoryview(plane))) for field, plane in _fields(memoryview(data)) if field == 1
        ]
        base_ns = min(_starts_ns(messages), default=0)
        planes = [_plane(message, base_ns) for message in messages]
    except (IndexError, ValueError, TypeError, OverflowError) as error:
        raise TraceError(f"{location} is a damaged XPlane trace, or none: {error}") from error
    device_of = {i: match[1] for i, plane in enumerate(planes) if (match := DEVICE.search(plane.name))}
    work = [
        (device, match[1], event)
        for i, device in device_of.items()
        for line in planes[i].lines
        if (match := STREAM.search(line.name))
        for event in line.events
    ]
    if not work:
        has = f"its planes are {listed_names([p.name for p in planes])}" if planes else "it has no planes"
        devices = " without streams" if device_of else ""
        raise TraceError(f"{location} holds no GPU activity{devices}: {has}; TPUs and CPUs are not read")
    host = [
        event
        for i, plane in enumerate(planes)
        if i not in device_of
        for line in plane.lines
        for event in line.events
    ]
    notes: list[str] = []
    rank = known_rank((rank_in_name(location),), notes)
    return assemble(
        _activities(work, host, base_ns, notes, location),
        location,
        classifier(tuple(rules)),
        source="kineto",
        rank=rank,
        world_size=None,
        device=None,
        device_index=device_index,
    )


def _activities(
    work: Sequence[tuple[str, str, _Event]],
    host: Sequence[_Event],
    base_ns: int,
    notes: list[str],
    location: str,
) -> Activities:
    """Columns of device, stream and event of the device's work."""
    launches = {event.stats[CORRELATION]: event for event in host if CORRELATION in event.stats}
    correlation = [event.stats.get(CORRELATION) for _, _, event in work]
    launch_ns = np.full(len(work), UNLINKED)
    linked = [i for i, key in enumerate(correlation) if key in launches]
    launch_ns[linked] = nanoseconds(
        [launches[key].start_ns for key in correlation if key is not None and key in launches], location
    )
    streams, stream = stream_labels([device for device, _, _ in work], [number for _, number, _ in work])
    names, name = indexed([event.name for _, _, event in work])
    start_ns = nanoseconds([event.start_ns for _, _, event in work], location)
    linked_ids = set(correlation)
    calls = {key: event for key, event in launches.items() if KERNEL_LAUNCH.match(event.name)}
    return Activities(
        start_ns=start_ns,
        end_ns=start_ns + nanoseconds([event.length_ns or 0 for _, _, event in work], location),
        category=np.array([_category(event.name) for _, _, event in work], dtype=np.int8),
        name=name,
        names=names,
        stream=stream,
        streams=streams,
        launch_ns=launch_ns,
        correlation=correlation,
        marks=_marks(host, location),
        num_launches=len(calls) if calls else None,
        dropped_ns=nanoseconds(
            [event.start_ns for key, event in calls.items() if key not in linked_ids], location
        ),
        is_timed=np.array([event.length_ns is not None for _, _, event in work]),
        base_ns=base_ns,
        notes=notes,
    )


def _category(name: str) -> int:
    match = COPY.match(name)
    if match is None:
        return int(Category.KERNEL)
    return int(Category.MEMSET if match[1].lower() == "memset" else Category.COPY)


def _marks(host: Sequence[_Event], location: str) -> list[StepMark]:
    rows = [event for event in host if STEP in event.stats]
    if any(event.stats[STEP] >= LARGEST_STEP for event in rows):
        raise TraceError(f"{location} has step numbers that no program counts to")
    return [
        StepMark(event.stats[STEP], 0, event.start_ns, event.start_ns + (event.length_ns or 0))
        for event in rows
    ]


# ---- protocol buffers, read without their schema -------------------------------------------------


def _starts_ns(planes: Sequence[Sequence[tuple[int, Any]]]) -> Iterator[int]:
    """Start of every line of the planes, to which its events' times are relative."""
    for plane in planes:
        for line in (value for field, value in plane if field == 3):
            starts = [_signed(value) for field, value in _fields(line) if field == 3]
            yield from starts[-1:]


def _plane(message: Sequence[tuple[int, Any]], base_ns: int) -> _Plane:
    event_names = dict(_table(value) for field, value in message if field == 4)
    stat_names = dict(_table(value) for field, value in message if field == 5)
    used = {number: stat for number, stat in stat_names.items() if stat in (CORRELATION, STEP)}
    return _Plane(
        "".join(_text(value) for field, value in message if field == 2),
        [_line(value, base_ns, event_names, used) for field, value in message if field == 3],
    )


def _line(data: memoryview, base_ns: int, event_names: dict[int, str], used: dict[int, str]) -> _Line:
    name, shown, start_ns, rows = "", "", base_ns, []
    for field, value in _fields(data):
        if field == 2:
            name = _text(value)
        elif field == 11:
            shown = _text(value)
        elif field == 3:
            start_ns = _signed(value)
        elif field == 4:
            rows.append(value)
    return _Line(name or shown, [_event(row, start_ns - base_ns, event_names, used) for row in rows])


def _event(row: memoryview, start_ns: int, names: dict[int, str], used: dict[int, str]) -> _Event:
    """An event of a line that starts at start_ns; used: names of the stats that are read, by number."""
    kind, offset_ps, duration_ps = 0, 0, None
    stats: dict[str, int] = {}
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
    length_ns = None if duration_ps is None else round(duration_ps / 1000)
    return _Event(names.get(kind, ""), start_ns + round(offset_ps / 1000), length_ns, stats)


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
