"""Reads rocpd, the SQLite output of rocprofv3 (its default since ROCm 7.0).

Two layouts are in use: times and places inline in rocpd_kernel_dispatch, and times in rocpd_timestamp
with places in rocpd_track. Both come with views (kernels, memory_copies, regions), which are read where
they are complete: the views join, and leave out kernels that lack a partner. Then, and where there are
no views, the tables are read. Checked only on files made by the tests after both schemas.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from aorta.errors import TraceError
from aorta.processes import no_garbage_collection
from aorta.traces.assemble import Category, nanoseconds
from aorta.traces.classify import COMM_RULES, CommRule
from aorta.traces.files import Database, integer, open_database, quoted
from aorta.traces.host_calls import HostCall
from aorta.traces.model import LeftOut, RankTrace, listed_names
from aorta.traces.rocprof import Columns, copy_category, copy_device, trace_of_columns

KERNEL_VIEW = {
    "process": ("pid",),
    "agent": ("agent_abs_index", "agent_absolute_index", "agent_id"),
    "queue": ("queue_id", "queue"),
    "stream": ("stream_id", "stream"),
    "correlation": ("stack_id",),
    "dispatch": ("dispatch_id",),
}
COPY_VIEW = {
    "process": ("pid",),
    "source": ("src_agent_abs_index", "src_agent_absolute_index", "src_device"),
    "destination": ("dst_agent_abs_index", "dst_agent_absolute_index", "dst_device"),
    "stream": ("stream_id", "stream_name"),
    "correlation": ("stack_id",),
}
REGION_VIEW = {
    "process": ("pid",),
    "thread": ("tid",),
    "correlation": ("stack_id",),
    "event": ("event_id",),
    "extra": ("extdata",),
}
"""In each of the three: columns that may hold a field, by version of rocprofv3; the first that exists is
read. Other fields are in the column of their name."""
NEEDED = ("start", "end", "name")
"""Fields that a view must have; the others are NULL where it lacks them."""

_RPD_JOINS = """ FROM rocpd_op O JOIN rocpd_string T ON T.id = O.opType_id
    LEFT JOIN rocpd_string N ON N.id = O.description_id LEFT JOIN rocpd_api_ops L ON L.op_id = O.id
    LEFT JOIN rocpd_api A ON A.id = L.api_id"""
_RPD_PROCESS = "coalesce(A.pid, (SELECT min(pid) FROM rocpd_api))"
_RPD_KERNELS = f"""SELECT O.start, O.end, N.string, {_RPD_PROCESS}, O.gpuId, O.queueId, K.stream, A.id, NULL
    {_RPD_JOINS} LEFT JOIN rocpd_kernelapi K ON K.api_ptr_id = A.id
    WHERE T.string = 'KernelExecution' GROUP BY O.id"""
_RPD_COPIES = f"""SELECT O.start, O.end,
    CASE T.string WHEN 'CopyDeviceToHost' THEN 'MEMORY_COPY_DEVICE_TO_HOST'
        WHEN 'CopyHostToDevice' THEN 'MEMORY_COPY_HOST_TO_DEVICE' ELSE T.string END,
    {_RPD_PROCESS}, O.gpuId, O.gpuId, K.stream, A.id
    {_RPD_JOINS} LEFT JOIN rocpd_copyapi K ON K.api_ptr_id = A.id
    WHERE T.string LIKE 'Copy%' OR T.string = 'FillBuffer' GROUP BY O.id"""
_RPD_REGIONS = """SELECT A.start, A.end, CASE N.string WHEN 'UserMarker' THEN M.string ELSE N.string END,
    CASE N.string WHEN 'UserMarker' THEN 'MARKER' ELSE 'HIP' END, A.pid, A.tid, A.id, NULL, NULL
    FROM rocpd_api A JOIN rocpd_string N ON N.id = A.apiName_id
    LEFT JOIN rocpd_string M ON M.id = A.args_id"""
"""The columns of _Kernel, _Copy and _Region of rocmProfileData's tables."""


class _Kernel(NamedTuple):
    """A dispatch."""

    start: int
    end: int
    name: str
    process: Any
    agent: Any
    queue: Any
    stream: Any
    correlation: int
    dispatch: int


class _Copy(NamedTuple):
    """A memory copy."""

    start: int
    end: int
    name: str
    process: Any
    source: Any
    destination: Any
    stream: Any
    correlation: int


class _Region(NamedTuple):
    """A call of the host, or a marker."""

    start: int
    end: int
    name: str
    category: str
    process: Any
    thread: Any
    correlation: int
    event: Any
    extra: str


def read_rocpd(
    path: Path | str,
    *,
    process: int | None = None,
    rules: Sequence[CommRule] = COMM_RULES,
    device_index: str | None = None,
    rank: int | None = None,
) -> RankTrace:
    """Trace of one process of a .db file; process may be left out where there is only one."""
    location = str(path)
    with no_garbage_collection(), open_database(path) as database:
        kernels, notes = _kernels(database)
        copies = _copies(database)
        present = sorted({k.process for k in kernels} | {c.process for c in copies}, key=str)
        if process is None and len(present) > 1:
            raise TraceError(f"{location} holds {len(present)} processes: {listed_names(present)}")
        if process is not None:
            kernels = [row for row in kernels if row.process == process]
            copies = [row for row in copies if row.process == process]
        regions = [row for row in _regions(database, notes) if process is None or row.process == process]
        columns = _columns(kernels, copies, regions, _arguments(database, regions), location)
        return trace_of_columns(
            location,
            columns._replace(notes=notes),
            rules=rules,
            device=_device(database),
            host=_host(database),
            device_index=device_index,
            rank=rank,
        )


def rocpd_processes(path: Path | str) -> list[int]:
    """Processes that the file holds device work of, in order."""
    with open_database(path) as database:
        processes = {row.process for row in _kernels(database)[0]} | {
            row.process for row in _copies(database)
        }
    return sorted(pid for pid in processes if isinstance(pid, int))


def is_rocpd(database: Database) -> bool:
    return any(name.startswith("rocpd_") for name in database.names)


def _is_rpd(database: Database) -> bool:
    return bool(database.columns("rocpd_op")) and bool(database.columns("rocpd_api_ops"))


def _kernels(database: Database) -> tuple[list[_Kernel], list[str]]:
    if _is_rpd(database):
        return [_Kernel(*row) for row in database.rows(_RPD_KERNELS)], []
    tables = _tables(database, "rocpd_kernel_dispatch")
    num_kernels = sum(database.count(table) for table in tables)
    rows = _from_view(database, "kernels", _Kernel._fields, KERNEL_VIEW)
    if rows is not None and (len(rows) == num_kernels or not tables):
        return [_Kernel(*row) for row in rows], []
    if not tables:
        raise TraceError(
            f"{database.location} is no rocpd file that can be read: it has no rocpd_kernel_dispatch,"
            " and no view kernels with start, end and name"
        )
    notes = []
    if rows is not None:
        notes.append(f"the view kernels has {len(rows)} rows for {num_kernels} kernels: the tables were read")
    return [row for table in tables for row in _kernels_of_table(database, table)], notes


def _kernels_of_table(database: Database, table: str) -> list[_Kernel]:
    """Kernels of one process's table of dispatches, for where the view kernels is not complete."""
    joined = _Joined(database, table, "rocpd_kernel_dispatch")
    joined.join("S", "rocpd_info_kernel_symbol", "kernel_id")
    name = joined.first("S.display_name", "S.kernel_name")
    columns = (
        joined.start,
        joined.end,
        name,
        joined.process,
        joined.place("agent_id"),
        joined.place("queue_id"),
        joined.place("stream_id"),
        joined.first("E.stack_id"),
        joined.first("K.dispatch_id"),
    )
    return [_Kernel(*row) for row in joined.rows(columns)]


def _copies(database: Database) -> list[_Copy]:
    if _is_rpd(database):
        return [_Copy(*row) for row in database.rows(_RPD_COPIES)]
    tables = _tables(database, "rocpd_memory_copy")
    rows = _from_view(database, "memory_copies", _Copy._fields, COPY_VIEW)
    if rows is not None and (not tables or len(rows) == sum(map(database.count, tables))):
        return [_Copy(*row) for row in rows]
    copies = []
    for table in tables:
        joined = _Joined(database, table, "rocpd_memory_copy")
        joined.join("N", "rocpd_string", "name_id")
        columns = (
            joined.start,
            joined.end,
            joined.first("N.string"),
            joined.process,
            joined.first("K.src_agent_id"),
            joined.first("K.dst_agent_id"),
            joined.place("stream_id"),
            joined.first("E.stack_id"),
        )
        copies += [_Copy(*row) for row in joined.rows(columns)]
    return copies


def _regions(database: Database, notes: list[str]) -> list[_Region]:
    if _is_rpd(database):
        return [_Region(*row) for row in database.rows(_RPD_REGIONS)]
    rows = _from_view(database, "regions", _Region._fields, REGION_VIEW)
    if rows is None:
        if _tables(database, "rocpd_region"):
            why = "there is no view regions that can be read"
            notes.append(LeftOut(f"{why}: host calls and markers are left out"))
        return []
    return [_Region(*row) for row in rows]


def _from_view(
    database: Database, view: str, names: Sequence[str], columns_of: Mapping[str, tuple[str, ...]]
) -> list[tuple[Any, ...]] | None:
    """Rows of a view; None where it is missing, lacks a needed field or cannot be queried."""
    present = database.columns(view)
    chosen = {name: next((c for c in columns_of.get(name, (name,)) if c in present), None) for name in names}
    if any(chosen[name] is None for name in NEEDED):
        return None
    columns = ", ".join("NULL" if column is None else quoted(column) for column in chosen.values())
    try:
        return database.rows(f"SELECT {columns} FROM {quoted(view)}")
    except TraceError:
        return None


def _tables(database: Database, base: str) -> list[str]:
    """Names to read: the view over all processes' tables where there is one, else these tables."""
    if database.columns(base):
        return [base]
    pattern = re.compile(rf"{base}_?[0-9a-fA-F_-]{{8,}}")
    return [name for name in database.names if pattern.fullmatch(name) and database.columns(name)]


class _Joined:
    """SQL of a table joined with what its rows refer to.

    Times and places are columns of the table itself, or of rocpd_timestamp and rocpd_track.
    """

    def __init__(self, database: Database, table: str, base: str) -> None:
        self._database = database
        self._table = table
        self._suffix = table.removeprefix(base)
        self._columns = {"K": database.columns(table)}
        self._joins = ""
        self.join("T", "rocpd_track", "track_id")
        self.join("E", "rocpd_event", "event_id")
        self.join("P", "rocpd_info_process", "pid")
        # A row's own pid is the number of a row of rocpd_info_process; a track's is the process's.
        self.process = self.first("P.pid", "K.pid", "T.pid")
        self.start, self.end = self.first("K.start"), self.first("K.end")
        if "NULL" in (self.start, self.end):
            self.join("DS", "rocpd_timestamp", "start_id")
            self.join("DE", "rocpd_timestamp", "end_id")
            self.start, self.end = self.first("DS.value"), self.first("DE.value")
        if "NULL" in (self.start, self.end):
            raise TraceError(
                f"{database.location}: {table} has neither start and end nor start_id and end_id;"
                f" it has {listed_names(self._columns['K'])}"
            )

    def join(self, alias: str, base: str, reference: str) -> None:
        """Join the table of that kind that belongs to this one, where there is one."""
        names = (base + self._suffix, base)
        joined_table = next((name for name in names if self._database.columns(name)), None)
        if joined_table is None or reference not in self._columns["K"]:
            return
        self._columns[alias] = self._database.columns(joined_table)
        self._joins += f" LEFT JOIN {quoted(joined_table)} {alias} ON {alias}.id = K.{reference}"
        if "guid" in self._columns["K"] and "guid" in self._columns[alias]:
            self._joins += f" AND {alias}.guid = K.guid"

    def first(self, *columns: str) -> str:
        """SQL for the first alias.column that exists and is not NULL."""
        split = [column.split(".") for column in columns]
        present = [f"{a}.{quoted(c)}" for a, c in split if c in self._columns.get(a, ())]
        return f"coalesce({', '.join(present)}, NULL)" if present else "NULL"

    def place(self, column: str) -> str:
        return self.first(f"K.{column}", f"T.{column}")

    def rows(self, columns: Sequence[str]) -> list[tuple[Any, ...]]:
        return self._database.rows(f"SELECT {', '.join(columns)} FROM {quoted(self._table)} K{self._joins}")


def _arguments(database: Database, regions: list[_Region]) -> dict[Any, dict[str, str]]:
    """Arguments of the calls of the RCCL API, by event."""
    events = {row.event for row in regions if "RCCL" in str(row.category) and row.event is not None}
    arguments: dict[Any, dict[str, str]] = {}
    for table in _tables(database, "rocpd_arg") if events else ():
        if {"event_id", "name", "value"} <= set(database.columns(table)):
            for event, name, value in database.rows(f"SELECT event_id, name, value FROM {quoted(table)}"):
                if event in events:
                    arguments.setdefault(event, {})[str(name)] = str(value)
    return arguments


def _columns(
    kernels: list[_Kernel],
    copies: list[_Copy],
    regions: list[_Region],
    arguments: dict[Any, dict[str, str]],
    location: str,
) -> Columns:
    rows: list[_Kernel | _Copy] = [*kernels, *copies]
    times = nanoseconds([integer(t) for r in regions for t in (r.start, r.end)], location).tolist()
    return Columns(
        start_ns=nanoseconds([integer(row.start) for row in rows], location),
        end_ns=nanoseconds([integer(row.end) for row in rows], location),
        category=[Category.KERNEL] * len(kernels)
        + [copy_category(str(c.name), c.source, c.destination) for c in copies],
        name=[str(row.name or "unnamed") for row in rows],
        device=[k.agent for k in kernels]
        + [copy_device(str(c.name), c.source, c.destination) for c in copies],
        stream=[row.stream for row in rows],
        queue=[f"queue {k.queue}" for k in kernels] + ["copies"] * len(copies),
        correlation=[integer(row.correlation) for row in rows],
        dispatch=[integer(k.dispatch) for k in kernels],
        calls=[
            HostCall(
                _message(r) if "MARKER" in str(r.category) else str(r.name),
                start,
                end,
                integer(r.thread),
                arguments.get(r.event, {}) if "RCCL" in str(r.category) else {},
                integer(r.correlation),
                str(r.category),
            )
            for r, start, end in zip(regions, times[::2], times[1::2], strict=True)
        ],
    )


def _message(region: _Region) -> str:
    """Text of a marker: the message in the extra data (the name is then roctx's call), or the name."""
    if isinstance(region.extra, str) and '"message"' in region.extra:
        try:
            extra = json.loads(region.extra)
        except (ValueError, RecursionError):
            return str(region.name)
        if isinstance(extra, dict) and isinstance(extra.get("message"), str):
            return str(extra["message"])
    return str(region.name)


def _device(database: Database) -> str | None:
    for table in _tables(database, "rocpd_info_agent"):
        columns = [c for c in ("product_name", "name") if c in database.columns(table)]
        if columns and "type" in database.columns(table):
            name = _first_text(database, table, f"coalesce({', '.join(columns)}, NULL)", "WHERE type = 'GPU'")
            if name:
                return name
    return None


def _host(database: Database) -> str | None:
    tables = [t for t in _tables(database, "rocpd_info_node") if "hostname" in database.columns(t)]
    return next(filter(None, (_first_text(database, table, "hostname") for table in tables)), None)


def _first_text(database: Database, table: str, column: str, where: str = "") -> str | None:
    rows = database.rows(f"SELECT {column} FROM {quoted(table)} {where} LIMIT 1")
    return str(rows[0][0]) if rows and rows[0][0] else None
