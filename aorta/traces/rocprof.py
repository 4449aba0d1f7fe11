"""Reads rocprofv3's JSON documents, and its CSV files (<prefix>_kernel_trace.csv and its companions).

rocpd.py reads its third format, a database. All three fill in Activities, end with finish(), and leave the
rest to assemble.py.
"""

import csv
from collections.abc import Iterable, Sequence
from itertools import repeat
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from aorta.errors import TraceError
from aorta.processes import no_garbage_collection
from aorta.timeline.arrays import Ints
from aorta.traces.assemble import (
    UNLINKED,
    Activities,
    Category,
    assemble,
    indexed,
    nanoseconds,
    stream_labels,
)
from aorta.traces.classify import COMM_RULES, CommRule, classifier
from aorta.traces.files import read_bytes
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
from aorta.traces.model import LeftOut, RankTrace, known_rank, rank_in_name

BOOT_CLOCK = "times are those of the machine's boot clock, not of the Unix clock"
STEPS_UNLINKED = LeftOut(
    "steps are marked, but without --hip-trace nothing ties kernels to them: they are left out"
)
TIMES = frozenset(("Start_Timestamp", "End_Timestamp"))
"""Columns of every CSV file of a trace."""
LONGEST_FIELD = 1 << 24
"""Letters of a CSV field: names of kernels are longer than the csv module allows by itself."""


class Columns(NamedTuple):
    """Rows of a capture as columns, whatever format it has: kernels first, then copies."""

    start_ns: Ints
    end_ns: Ints
    category: Sequence[Category]
    name: Sequence[str]
    device: Sequence[object]
    stream: Sequence[object]
    """HIP stream of each activity; None where it is not known."""
    queue: Sequence[str]
    """Label in place of an unknown stream."""
    correlation: Sequence[int]
    dispatch: Sequence[int]
    """Numbers of the kernels' dispatches."""
    calls: Sequence[HostCall]
    """Every call of the host, and roctx markers."""
    notes: Sequence[str] = ()


def trace_of_columns(
    location: str,
    columns: Columns,
    *,
    rules: Sequence[CommRule],
    device_index: str | None,
    rank: int | None,
    device: str | None = None,
    host: str | None = None,
) -> RankTrace:
    """Trace of a capture of one process.

    Leaves out activities without times, and steps where no host call links work to them, and notes it. The
    rank is told by the best evidence: the communicator's, the file's name, the caller's assumption.
    """
    category = np.array(columns.category, dtype=np.int8)
    names, name = indexed(columns.name)
    is_awaited = np.array([may_be_awaited(text) for text in names], bool)
    is_copy = np.flatnonzero((category == Category.COPY) & is_awaited[name])
    half_ns = (columns.start_ns + (columns.end_ns - columns.start_ns) // 2)[is_copy]
    copied = [columns.correlation[i] for i in is_copy.tolist()]
    markers = [HostEvent(*call[:4]) for call in columns.calls if "MARKER" in call.domain]
    calls: list[CallRow] = [
        (call.correlation, call.start_ns, call.end_ns, call.thread, call.name)
        for call in columns.calls
        if "MARKER" not in call.domain
    ]
    try:
        links = link(np.array(columns.correlation, np.int64), HostCalls.from_rows(calls))
        host_side = host_of_calls(calls, markers, (copied, half_ns), links)
    except OverflowError as error:
        raise TraceError(f"{location} has numbers that no tool writes: {error}") from error
    collectives = CollectiveCalls([call for call in columns.calls if "RCCL" in call.domain])
    labels = [queue if of is None else of for of, queue in zip(columns.stream, columns.queue, strict=True)]
    streams, stream = stream_labels(columns.device, labels)
    work = Activities(
        start_ns=columns.start_ns,
        end_ns=columns.end_ns,
        category=category,
        name=name,
        names=names,
        stream=stream,
        streams=streams,
        launch_ns=links.launch_ns,
        correlation=columns.correlation,
        info=collectives.information(links),
        marks=step_marks((event.name, 0, event.start_ns, event.end_ns) for event in markers),
        num_launches=links.num_launches,
        dropped_ns=links.dropped_ns,
        num_missing_dispatches=_dispatch_gaps(columns.dispatch, location),
        host=host_side,
        notes=[BOOT_CLOCK, *columns.notes],
    )
    has_time = (work.start_ns > 0) & (work.end_ns > 0)
    work.num_without_time += int(np.count_nonzero(~has_time))
    work.keep(has_time)
    if work.marks and not (work.launch_ns != UNLINKED).any():
        work.marks = []
        work.notes.append(STEPS_UNLINKED)
    return assemble(
        work,
        location,
        classifier(tuple(rules)),
        source="rocprofv3",
        rank=known_rank((collectives.rank, rank_in_name(location), rank), work.notes),
        world_size=collectives.num_ranks,
        device=device,
        host=host,
        device_index=device_index,
    )


def _dispatch_gaps(numbers: Sequence[int], location: str) -> int:
    try:
        unique = np.unique(np.array([number for number in numbers if number > 0], dtype=np.int64))
    except OverflowError as error:
        raise TraceError(f"{location} has dispatch numbers that no tool writes: {error}") from error
    return int(unique[-1] - unique[0]) + 1 - len(unique) if len(unique) else 0


# ---- JSON --------------------------------------------------------------------------------------


class _Handle(msgspec.Struct, gc=False, frozen=True):
    handle: int = 0


class _Correlation(msgspec.Struct, gc=False, frozen=True):
    internal: int = 0


class _Info(msgspec.Struct, gc=False, frozen=True):
    kernel_id: int
    agent_id: _Handle = _Handle()
    queue_id: _Handle = _Handle()
    dispatch_id: int = 0


class _Dispatch(msgspec.Struct, gc=False, frozen=True):
    start_timestamp: int
    end_timestamp: int
    dispatch_info: _Info
    correlation_id: _Correlation = _Correlation()
    stream_id: _Handle | None = None


class _Copy(msgspec.Struct, gc=False, frozen=True):
    start_timestamp: int
    end_timestamp: int
    kind: int = 0
    operation: int = 0
    correlation_id: _Correlation = _Correlation()
    dst_agent_id: _Handle = _Handle()
    src_agent_id: _Handle = _Handle()
    stream_id: _Handle | None = None


class _Argument(msgspec.Struct, gc=False, frozen=True):
    name: str = ""
    value: Any = None


class _Call(msgspec.Struct, gc=False, frozen=True):
    start_timestamp: int
    end_timestamp: int
    kind: int = 0
    operation: int = 0
    thread_id: int = 0
    correlation_id: _Correlation = _Correlation()
    args: list[_Argument] | dict[str, Any] | None = None


class _Records(msgspec.Struct, frozen=True):
    kernel_dispatch: list[_Dispatch] = []
    memory_copy: list[_Copy] = []
    hip_api: list[_Call] = []
    hsa_api: list[_Call] = []
    rccl_api: list[_Call] = []
    marker_api: list[_Call] = []


class _Symbol(msgspec.Struct, gc=False, frozen=True):
    kernel_id: int
    kernel_name: str = ""
    formatted_kernel_name: str = ""


class _Kind(msgspec.Struct, frozen=True):
    kind: str = ""
    operations: list[str] = []


class _Text(msgspec.Struct, frozen=True):
    key: int
    value: str


class _Strings(msgspec.Struct, frozen=True):
    buffer_records: list[_Kind] = []
    marker_api: list[_Text] = []


class _Agent(msgspec.Struct, frozen=True):
    id: _Handle = _Handle()
    type: int = 0
    name: str = ""
    product_name: str = ""


class _Node(msgspec.Struct, frozen=True):
    hostname: str | None = None


class _Metadata(msgspec.Struct, frozen=True):
    pid: int | None = None
    node: _Node = _Node()


class _Tool(msgspec.Struct, frozen=True):
    buffer_records: _Records
    metadata: _Metadata = _Metadata()
    agents: list[_Agent] = []
    kernel_symbols: list[_Symbol] = []
    strings: _Strings = _Strings()


class _File(msgspec.Struct, frozen=True):
    tool: _Tool | list[_Tool] = msgspec.field(name="rocprofiler-sdk-tool")


def parse_rocprofv3_json(
    data: bytes,
    location: str,
    *,
    rules: Sequence[CommRule] = COMM_RULES,
    device_index: str | None = None,
    rank: int | None = None,
) -> RankTrace:
    """Trace of a JSON document. location names it in errors; rank is used where nothing tells one."""
    with no_garbage_collection():
        tool = _decode_json(data, location)
        agents_in_use = {
            record.dispatch_info.agent_id.handle for record in tool.buffer_records.kernel_dispatch
        }
        device = next((a.product_name or a.name for a in tool.agents if a.id.handle in agents_in_use), None)
        return trace_of_columns(
            location,
            _json_columns(tool, location),
            rules=rules,
            device=device or None,
            host=tool.metadata.node.hostname,
            device_index=device_index,
            rank=rank,
        )


def _decode_json(data: bytes, location: str) -> _Tool:
    """The capture in a document that has device work. Raises TraceError where none or several have."""
    try:
        tool = msgspec.json.decode(data, type=_File).tool
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        text = str(error)
        if "missing" in text and "rocprofiler-sdk-tool" in text:
            raise TraceError(
                f"{location} is JSON but not from rocprofv3: it has no rocprofiler-sdk-tool"
            ) from error
        raise TraceError(f"{location} is not readable output of rocprofv3: {text}") from error
    tools = tool if isinstance(tool, list) else [tool]
    busy = [
        candidate
        for candidate in tools
        if candidate.buffer_records.kernel_dispatch or candidate.buffer_records.memory_copy
    ]
    if len(busy) > 1:
        raise TraceError(f"{location} holds {len(busy)} captures; give one file per rank")
    if not busy:
        raise TraceError(f"{location} holds no GPU activity (kernels, copies): was --kernel-trace given?")
    return busy[0]


def _json_columns(tool: _Tool, location: str) -> Columns:
    records = tool.buffer_records
    kernels, copies = records.kernel_dispatch, records.memory_copy
    rows: list[_Dispatch | _Copy] = [*kernels, *copies]
    symbol = {s.kernel_id: s.formatted_kernel_name or s.kernel_name for s in tool.kernel_symbols}
    kinds = tool.strings.buffer_records
    gpus = {agent.id.handle for agent in tool.agents if agent.type == 2}
    rccl = records.rccl_api
    nanoseconds(
        [time for c in rccl for time in (c.start_timestamp, c.end_timestamp)], location
    )  # checks them
    messages = {text.key: text.value for text in tool.strings.marker_api}
    return Columns(
        start_ns=nanoseconds([row.start_timestamp for row in rows], location),
        end_ns=nanoseconds([row.end_timestamp for row in rows], location),
        category=[Category.KERNEL] * len(kernels)
        + [
            Category.PEER_COPY
            if c.src_agent_id.handle != c.dst_agent_id.handle
            and {c.src_agent_id.handle, c.dst_agent_id.handle} <= gpus
            else Category.COPY
            for c in copies
        ],
        name=[symbol.get(k.dispatch_info.kernel_id) or "unnamed" for k in kernels]
        + [_operation(kinds, c.kind, c.operation) for c in copies],
        device=[k.dispatch_info.agent_id.handle for k in kernels]
        + [c.dst_agent_id.handle if c.dst_agent_id.handle in gpus else c.src_agent_id.handle for c in copies],
        stream=[row.stream_id.handle if row.stream_id else None for row in rows],
        queue=[f"queue {k.dispatch_info.queue_id.handle}" for k in kernels] + ["copies"] * len(copies),
        correlation=[row.correlation_id.internal for row in rows],
        dispatch=[k.dispatch_info.dispatch_id for k in kernels],
        calls=[
            HostCall(
                "MARKER" in domain
                and messages.get(c.correlation_id.internal)
                or _operation(kinds, c.kind, c.operation),
                c.start_timestamp,
                c.end_timestamp,
                c.thread_id,
                _arguments(c) if domain == "RCCL" else {},
                c.correlation_id.internal,
                domain,
            )
            for domain, of_domain in (
                ("HSA", records.hsa_api),
                ("HIP", records.hip_api),
                ("RCCL", rccl),
                ("MARKER", records.marker_api),
            )
            for c in of_domain
        ],
    )


def _operation(kinds: list[_Kind], kind: int, operation: int) -> str:
    """Name of an operation in the document's own table: the numbers differ between versions."""
    try:
        if kind >= 0 and operation >= 0:
            return kinds[kind].operations[operation]
    except IndexError:
        pass
    return f"operation {kind}.{operation}"


def _arguments(call: _Call) -> dict[str, str]:
    if isinstance(call.args, dict):
        return {name: str(value) for name, value in call.args.items()}
    return {argument.name: str(argument.value) for argument in call.args or ()}


# ---- CSV ---------------------------------------------------------------------------------------


class _CsvTable(NamedTuple):
    """One CSV file: places of its columns, and its rows as text."""

    location: str
    columns: dict[str, int]
    rows: list[list[str]]

    def texts(self, *names: str, missing: str = "") -> list[str]:
        """Texts of the first of these columns that the file has."""
        for name in names:
            if name in self.columns:
                i = self.columns[name]
                return [row[i] for row in self.rows]
        return [missing] * len(self.rows)

    def numbers(self, name: str) -> list[int]:
        try:
            return [int(text) if text else 0 for text in self.texts(name)]
        except ValueError as error:
            raise TraceError(f"{self.location}: column {name} holds no whole number: {error}") from error

    def times(self, name: str) -> Ints:
        return nanoseconds(self.numbers(name), self.location)


def read_rocprofv3_csv(
    paths: Iterable[Path | str],
    *,
    rules: Sequence[CommRule] = COMM_RULES,
    device_index: str | None = None,
    rank: int | None = None,
) -> RankTrace:
    """Trace of the CSV files of one process. rank is used where no file's name tells one."""
    with no_garbage_collection():
        tables: dict[str, list[_CsvTable]] = {"kernel": [], "copy": [], "api": []}
        location = ""
        for path in sorted(map(str, paths)):
            table, kind = _read_csv(path)
            if kind is not None:
                tables[kind].append(table)
                location = path if kind == "kernel" or not location else location
        if not tables["kernel"] and not tables["copy"]:
            raise TraceError(f"{location or 'the CSV set'} has no kernel_trace: was --kernel-trace given?")
        columns = _csv_columns(tables, location)
        return trace_of_columns(location, columns, rules=rules, device_index=device_index, rank=rank)


def kind_of_header(header: Sequence[str]) -> str | None:
    """Kind of a CSV file by its first line: kernel, copy or api; None where it is none of rocprofv3's
    traces."""
    columns = set(header)
    if not columns >= TIMES:
        return None
    if "Kernel_Name" in columns:
        return "kernel"
    if columns >= {"Domain", "Function"}:
        return "api"
    return "copy" if "Direction" in columns else None


def _read_csv(path: str) -> tuple[_CsvTable, str | None]:
    data = read_bytes(path)
    csv.field_size_limit(LONGEST_FIELD)
    try:
        reader = csv.reader(data.decode("utf-8", "replace").splitlines(keepends=True), strict=True)
        header = next(reader, [])
        rows = [row for row in reader if row]
    except csv.Error as error:
        raise TraceError(f"{path} is damaged CSV: {error}") from error
    kind = kind_of_header(header)
    if kind is not None:
        ragged = next((i for i, row in enumerate(rows, start=2) if len(row) != len(header)), None)
        if ragged is not None:
            raise TraceError(f"{path}: line {ragged} has {len(rows[ragged - 2])} columns, not {len(header)}")
    return _CsvTable(path, {name: i for i, name in enumerate(header)}, rows), kind


def _csv_columns(tables: dict[str, list[_CsvTable]], location: str) -> Columns:
    kernels, copies = tables["kernel"], tables["copy"]
    work_tables = [*kernels, *copies]
    return Columns(
        start_ns=np.concatenate([t.times("Start_Timestamp") for t in work_tables]),
        end_ns=np.concatenate([t.times("End_Timestamp") for t in work_tables]),
        category=[Category.KERNEL for t in kernels for _ in t.rows]
        + [copy_category(*ends) for t in copies for ends in _copy_ends(t)],
        name=[text or "unnamed" for t in kernels for text in t.texts("Kernel_Name")]
        + [text or "copy" for t in copies for text in t.texts("Direction")],
        device=[text for t in kernels for text in t.texts("Agent_Id")]
        + [copy_device(*ends) for t in copies for ends in _copy_ends(t)],
        stream=[text or None for t in work_tables for text in t.texts("Stream_Id")],
        queue=[f"queue {text}" for t in kernels for text in t.texts("Queue_Id")]
        + ["copies" for t in copies for _ in t.rows],
        correlation=[number for t in work_tables for number in t.numbers("Correlation_Id")],
        dispatch=[number for t in kernels for number in t.numbers("Dispatch_Id")],
        calls=[call for t in tables["api"] for call in _calls(t)],
    )


def _calls(table: _CsvTable) -> Iterable[HostCall]:
    return map(
        HostCall,
        table.texts("Function"),
        table.times("Start_Timestamp").tolist(),
        table.times("End_Timestamp").tolist(),
        nanoseconds(table.numbers("Thread_Id"), table.location).tolist(),
        repeat({}),
        nanoseconds(table.numbers("Correlation_Id"), table.location).tolist(),
        table.texts("Domain"),
    )


def _copy_ends(table: _CsvTable) -> Iterable[tuple[str, str, str]]:
    names = ("Direction", "Source_Agent_Id", "Destination_Agent_Id")
    return zip(*map(table.texts, names), strict=True)


def copy_device(direction: str, source: object, destination: object) -> object:
    """Device of a copy: its destination, or its source if it goes to the host."""
    return source if "DEVICE_TO_HOST" in direction.upper() else destination


def copy_category(direction: str, source: object, destination: object) -> Category:
    is_peer = "DEVICE_TO_DEVICE" in direction.upper() and source != destination
    return Category.PEER_COPY if is_peer else Category.COPY
