"""Reads the SQLite export of Nsight Systems (nsys export --type sqlite).

Tables exist only where the report has such events, and columns grew between versions: both are looked
for, and what is missing is said. Times are ns from the start of the session; the session's own start is
in TARGET_INFO_SESSION_START_TIME. Checked only on files made by the tests after the schema in NVIDIA's
documentation.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from aorta.errors import TraceError
from aorta.processes import no_garbage_collection
from aorta.timeline.collective import canonical_op
from aorta.traces.assemble import Activities, Category, assemble, indexed, nanoseconds, stream_labels
from aorta.traces.classify import COMM_RULES, CommRule, classifier
from aorta.traces.files import Database, integer, open_database, quoted
from aorta.traces.host_calls import (
    CallRow,
    CollectiveCalls,
    HostCall,
    HostCalls,
    host_of_calls,
    link,
    step_marks,
)
from aorta.traces.host_spans import HostEvent, may_be_awaited
from aorta.traces.model import RankTrace, known_rank, listed_names, rank_in_name

KERNEL, COPY, MEMSET = (f"CUPTI_ACTIVITY_KIND_{kind}" for kind in ("KERNEL", "MEMCPY", "MEMSET"))
RUNTIME, NVTX, STRINGS = "CUPTI_ACTIVITY_KIND_RUNTIME", "NVTX_EVENTS", "StringIds"
PLACE = ("start", "end", "deviceId", "contextId", "streamId", "correlationId", "globalPid")
"""Columns of the tables of device work."""
ID_UNIT = 0x1000000
"""globalTid = ... * ID_UNIT**2 + pid * ID_UNIT + tid; globalPid has a tid of 0."""
COPY_KINDS = {1: "Memcpy HtoD", 2: "Memcpy DtoH", 8: "Memcpy DtoD", 10: "Memcpy PtoP"}
LOST = re.compile(r"dropped|lost|overflow|not all|incomplete", re.IGNORECASE)
"""Words of nsys's own diagnostics that say that events are missing."""
NCCL_RANGE = re.compile(r"nccl[A-Z]\w+")
"""NVTX ranges that NCCL makes around its calls."""


def read_nsys(
    path: Path | str,
    *,
    process: int | None = None,
    rules: Sequence[CommRule] = COMM_RULES,
    device_index: str | None = None,
    rank: int | None = None,
) -> RankTrace:
    """Trace of one process of a .sqlite file; process may be left out where there is only one."""
    location = str(path)
    with no_garbage_collection(), open_database(path) as database:
        work, num_processes = _activities(database, process)
        # The name of a file with several processes cannot tell the rank of one of them.
        name_rank = None if num_processes > 1 else rank_in_name(location)
        return assemble(
            work,
            location,
            classifier(tuple(rules)),
            source="nsys",
            rank=known_rank((name_rank, rank), work.notes),
            world_size=None,
            device=_device(database),
            host=_host(database),
            device_index=device_index,
        )


def nsys_processes(path: Path | str) -> list[int]:
    """Processes that did device work, in order of their devices, then of their numbers."""
    with open_database(path) as database:
        device_of: dict[int, int] = {}
        for table in (KERNEL, COPY, MEMSET):
            if {"globalPid", "deviceId"} <= set(database.columns(table)):
                rows = database.rows(f"SELECT DISTINCT globalPid, deviceId FROM {quoted(table)}")
                for process, device in rows:
                    if type(process) is int:
                        device = device if type(device) is int else 0
                        pid = _pid(process)
                        device_of[pid] = min(device_of.get(pid, device), device)
    return sorted(device_of, key=lambda pid: (device_of[pid], pid))


def is_nsys(database: Database) -> bool:
    return STRINGS in database.names and any(
        name.startswith(("CUPTI_ACTIVITY_KIND_", "TARGET_INFO_", "META_DATA_EXPORT"))
        for name in database.names
    )


def _activities(database: Database, process: int | None) -> tuple[Activities, int]:
    """Device activities of the process as columns, and the number of processes in the file."""
    location = database.location
    if not any(database.columns(table) for table in (KERNEL, COPY, MEMSET)):
        raise TraceError(
            f"{location} holds no GPU activity: it has no {KERNEL}; was nsys run with --trace=cuda?"
        )
    strings = dict(_select(database, STRINGS, "id", "value"))
    notes = _missing(database)
    rows = [
        (Category.KERNEL, _kernel_name(strings, row[7:]), *row[:7])
        for row in _select(database, KERNEL, *PLACE, "demangledName", "shortName", "mangledName", "name")
    ]
    rows += [
        (Category.PEER_COPY if row[7] == 10 else Category.COPY, COPY_KINDS.get(row[7], "Memcpy"), *row[:7])
        for row in _select(database, COPY, *PLACE, "copyKind")
    ]
    rows += [(Category.MEMSET, "Memset", *row) for row in _select(database, MEMSET, *PLACE)]
    pids = [_pid(row[8]) for row in rows]
    present = sorted(set(pids))
    if process is None and len(present) > 1:
        raise TraceError(f"{location} holds {len(present)} processes: {listed_names(present)}")
    if process is not None:
        rows = [row for row, pid in zip(rows, pids, strict=True) if pid == process]
    timed = [row for row in rows if type(row[2]) is int and type(row[3]) is int]
    num_without_time, rows = len(rows) - len(timed), timed
    names, name = indexed([row[1] for row in rows])
    streams, stream = stream_labels([row[4] for row in rows], [row[6] for row in rows])
    start_ns = nanoseconds([integer(row[2]) for row in rows], location)
    correlation = [integer(row[7]) for row in rows]
    calls, ranges, collectives = _host_side(database, strings, process, location)
    links = link(nanoseconds(correlation, location), HostCalls.from_rows(calls))
    info_of = collectives.information(links)
    base_ns = _base_ns(database, notes)
    end_ns = nanoseconds([integer(row[3]) for row in rows], location)
    category = np.array([int(row[0]) for row in rows], dtype=np.int8)
    is_awaited = np.array([may_be_awaited(text) for text in names], bool)
    copies = np.flatnonzero((category == Category.COPY) & is_awaited[name])
    copied, half_ns = [correlation[i] for i in copies.tolist()], (start_ns + (end_ns - start_ns) // 2)[copies]
    return (
        Activities(
            start_ns=start_ns,
            end_ns=end_ns,
            category=category,
            name=name,
            names=names,
            stream=stream,
            streams=streams,
            launch_ns=links.launch_ns,
            correlation=correlation,
            hints={i: info.op for i, info in info_of.items() if info.op is not None},
            marks=step_marks((event.name, 0, event.start_ns, event.end_ns) for event in ranges),
            num_launches=links.num_launches,
            dropped_ns=links.dropped_ns,
            num_without_time=num_without_time,
            host=host_of_calls(calls, ranges, (copied, half_ns), links),
            base_ns=base_ns,
            notes=notes,
        ),
        len(present),
    )


def _host_side(
    database: Database, strings: dict[Any, Any], process: int | None, location: str
) -> tuple[list[CallRow], list[HostEvent], CollectiveCalls]:
    """Runtime calls, NVTX ranges, and those that NCCL makes."""
    rows = [
        (
            integer(correlation),
            integer(start),
            integer(end),
            integer(thread),
            str(strings.get(name, "")),
        )
        for start, end, correlation, thread, name in _select(
            database, RUNTIME, "start", "end", "correlationId", "globalTid", "nameId"
        )
        if process is None or _pid(thread) == process
    ]
    for column in zip(*(row[:4] for row in rows), strict=True):
        nanoseconds(column, location)
    ranges = [
        HostEvent(
            str(text if text is not None else strings.get(text_id, "")),
            integer(start),
            end,
            integer(thread),
        )
        for start, end, text, text_id, thread in _select(
            database, NVTX, "start", "end", "text", "textId", "globalTid"
        )
        if type(end) is int and (process is None or _pid(thread) == process)
    ]
    nanoseconds([time for event in ranges for time in (event.start_ns, event.end_ns)], location)
    nccl = [
        HostCall(event.name, event.start_ns, event.end_ns, integer(event.thread), {})
        for event in ranges
        if NCCL_RANGE.match(event.name) and canonical_op(event.name)
    ]
    return rows, ranges, CollectiveCalls(nccl)


def _kernel_name(strings: dict[Any, Any], ids: Sequence[Any]) -> str:
    for name in ids:
        if name is not None:
            text = strings.get(name) if type(name) is int else name
            if text is not None:
                return str(text)
    return "unnamed"


def _missing(database: Database) -> list[str]:
    """Notes on what the export lacks."""
    notes = []
    if not database.columns(KERNEL):
        notes.append("the export has no kernels, only copies")
    if not database.columns(RUNTIME):
        notes.append("the export has no runtime calls: work cannot be tied to steps")
    elif "correlationId" not in database.columns(KERNEL):
        notes.append("kernels have no correlationId: work cannot be tied to steps")
    if "text" in database.columns("DIAGNOSTIC_EVENT"):
        texts = [str(row[0]) for row in _select(database, "DIAGNOSTIC_EVENT", "text")]
        lost = [" ".join(text.split()) for text in texts if LOST.search(text)]
        notes += [f"nsys says: {text[:200]}" for text in lost[:3]]
    return notes


def _base_ns(database: Database, notes: list[str]) -> int:
    rows = _select(database, "TARGET_INFO_SESSION_START_TIME", "utcEpochNs")
    if rows and type(rows[0][0]) is int:
        return rows[0][0]
    notes.append("the export lacks the session's start: times are relative to it, not on the Unix clock")
    return 0


def _device(database: Database) -> str | None:
    rows = _select(database, "TARGET_INFO_GPU", "name")
    return str(rows[0][0]) if rows and rows[0][0] is not None else None


def _host(database: Database) -> str | None:
    rows = _select(database, "TARGET_INFO_SYSTEM_ENV", "name", "value")
    return next((str(value) for name, value in rows if name == "Hostname" and value is not None), None)


def _select(database: Database, table: str, *columns: str) -> list[tuple[Any, ...]]:
    """Rows of these columns, NULL for those that the table lacks; nothing where there is no table."""
    present = database.columns(table)
    if not present:
        return []
    if table in (KERNEL, COPY, MEMSET) and not {"start", "end"} <= set(present):
        raise TraceError(f"{database.location}: {table} lacks start or end; it has {listed_names(present)}")
    chosen = ", ".join(quoted(column) if column in present else "NULL" for column in columns)
    return database.rows(f"SELECT {chosen} FROM {quoted(table)}")


def _pid(global_id: Any) -> int:
    """Process number within a globalPid or globalTid; 0 where there is none."""
    return global_id // ID_UNIT % ID_UNIT if type(global_id) is int else 0
