"""Reads rocprofv3's JSON output (rocprofv3 --output-format json).

Checked on a capture of 50 training steps on an MI350X; API calls, copies and markers only on files
made by the tests after the tool's documentation and tests.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from aorta.errors import TraceError
from aorta.processes import no_garbage_collection
from aorta.traces.assemble import Activities, Category, assemble, indexed, nanoseconds
from aorta.traces.classify import COMM_RULES, CommRule, classifier
from aorta.traces.host_calls import CollectiveCalls, HostCall, HostCalls, link, step_marks
from aorta.traces.model import RankTrace
from aorta.traces.rocprof.rocm import BOOT_CLOCK, dispatch_gaps, finish, stream_labels


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


class Tool(msgspec.Struct, frozen=True):
    buffer_records: _Records
    metadata: _Metadata = _Metadata()
    agents: list[_Agent] = []
    kernel_symbols: list[_Symbol] = []
    strings: _Strings = _Strings()


class _File(msgspec.Struct, frozen=True):
    tool: Tool | list[Tool] = msgspec.field(name="rocprofiler-sdk-tool")


def parse_rocprofv3_json(
    data: bytes,
    location: str,
    *,
    rules: Sequence[CommRule] = COMM_RULES,
    device_index: str | None = None,
    rank: int | None = None,
) -> RankTrace:
    with no_garbage_collection():
        tool = _decode(data, location)
        work, calls = _columns(tool, location)
        agents_in_use = {
            record.dispatch_info.agent_id.handle for record in tool.buffer_records.kernel_dispatch
        }
        device = next((a.product_name or a.name for a in tool.agents if a.id.handle in agents_in_use), None)
        return assemble(
            work,
            location,
            classifier(tuple(rules)),
            source="rocprofv3",
            device=device or None,
            host=tool.metadata.node.hostname,
            device_index=device_index,
            **finish(work, calls, location, rank),
        )


def _decode(data: bytes, location: str) -> Tool:
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


def _columns(tool: Tool, location: str) -> tuple[Activities, CollectiveCalls]:
    kernels, copies = tool.buffer_records.kernel_dispatch, tool.buffer_records.memory_copy
    symbol = {s.kernel_id: s.formatted_kernel_name or s.kernel_name for s in tool.kernel_symbols}
    kinds = tool.strings.buffer_records
    of_kernel = [symbol.get(k.dispatch_info.kernel_id) or "unnamed" for k in kernels]
    names, name = indexed(of_kernel + [_operation(kinds, c.kind, c.operation) for c in copies])
    rows: list[_Dispatch | _Copy] = [*kernels, *copies]
    gpus = {agent.id.handle for agent in tool.agents if agent.type == 2}
    category = [int(Category.KERNEL)] * len(kernels) + [
        int(Category.PEER_COPY)
        if c.src_agent_id.handle != c.dst_agent_id.handle
        and {c.src_agent_id.handle, c.dst_agent_id.handle} <= gpus
        else int(Category.COPY)
        for c in copies
    ]
    streams, stream = stream_labels(
        [k.dispatch_info.agent_id.handle for k in kernels]
        + [c.dst_agent_id.handle if c.dst_agent_id.handle in gpus else c.src_agent_id.handle for c in copies],
        [k.stream_id.handle if k.stream_id else None for k in kernels]
        + [c.stream_id.handle if c.stream_id else None for c in copies],
        [f"queue {k.dispatch_info.queue_id.handle}" for k in kernels] + ["copies"] * len(copies),
    )
    correlation = [row.correlation_id.internal for row in rows]
    rccl = [
        HostCall(
            _operation(kinds, c.kind, c.operation),
            c.start_timestamp,
            c.end_timestamp,
            c.thread_id,
            _arguments(c),
        )
        for c in tool.buffer_records.rccl_api
    ]
    nanoseconds([time for call in rccl for time in (call.start_ns, call.end_ns)], location)
    calls = [
        (c.correlation_id.internal, c.start_timestamp, c.thread_id, _operation(kinds, c.kind, c.operation))
        for part in (tool.buffer_records.hsa_api, tool.buffer_records.hip_api, tool.buffer_records.rccl_api)
        for c in part
    ]
    try:
        links = link(np.array(correlation, np.int64), HostCalls.from_rows(calls))
    except OverflowError as error:
        raise TraceError(f"{location} has numbers that no tool writes: {error}") from error
    messages = {text.key: text.value for text in tool.strings.marker_api}
    collectives = CollectiveCalls(rccl)
    work = Activities(
        start_ns=nanoseconds([row.start_timestamp for row in rows], location),
        end_ns=nanoseconds([row.end_timestamp for row in rows], location),
        category=np.array(category, dtype=np.int8),
        name=name,
        names=names,
        stream=stream,
        streams=streams,
        launch_ns=links.launch_ns,
        correlation=correlation,
        info=collectives.information(links),
        marks=step_marks(
            (
                messages.get(c.correlation_id.internal) or _operation(kinds, c.kind, c.operation),
                0,
                c.start_timestamp,
                c.end_timestamp,
            )
            for c in tool.buffer_records.marker_api
        ),
        num_launches=links.num_launches,
        dropped_ns=links.dropped_ns,
        num_missing_dispatches=dispatch_gaps([k.dispatch_info.dispatch_id for k in kernels], location),
        notes=[BOOT_CLOCK],
    )
    return work, collectives


def _operation(kinds: list[_Kind], kind: int, operation: int) -> str:
    """What the tool's table calls it; the numbers differ between versions."""
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
