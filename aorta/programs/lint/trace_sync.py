"""Happens-before graph of a Kineto trace: kernels by stream, and the waits between streams.

Needs synchronisation events (`profiling.sync_events`, torch's enable_cuda_sync_events). Order of issue is
the order of correlation ids, which the driver counts up with every call.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from aorta.programs.language.expr import HostProgramError
from aorta.programs.language.graph import Graph, Node, Why
from aorta.traces.classify import COMM_RULES, Classifier, CommRule
from aorta.traces.files import read_bytes
from aorta.traces.kineto_file import GraphArgs, GraphEvent, decode

WORK = frozenset(("kernel", "gpu_memcpy", "gpu_memset"))
SYNC = "cuda_sync"
STREAM_WAIT, EVENT_SYNC, STREAM_SYNC = "Stream Wait Event", "Event Sync", "Stream Sync"


def trace_graph(path: Path | str, rules: Sequence[CommRule] = COMM_RULES) -> Graph:
    """Graph of a .json or .json.gz trace of one rank.

    Raises HostProgramError for a trace without synchronisation events, and TraceError for no trace.
    """
    events = decode(read_bytes(path), str(path), GraphArgs).events
    work = list(_calls(event for event in events if event.cat in WORK))
    syncs = list(_calls(event for event in events if event.cat == SYNC))
    if not work:
        raise HostProgramError(f"{path} holds no kernels or copies: was the GPU traced?")
    if not syncs:
        raise HostProgramError(
            f"{path} has no synchronisation events: record with profiling.sync_events=true"
        )
    return _Builder(work, syncs, rules).build()


def _calls(events: Iterable[GraphEvent]) -> Iterable[tuple[int, str, GraphArgs]]:
    """Events as (correlation, name, arguments); those without a correlation cannot be placed."""
    for event in events:
        if event.args is not None and (correlation := _integer(event.args.correlation)) is not None:
            yield correlation, event.name, event.args


def _integer(value: Any) -> int | None:
    try:
        return int(value)
    except (TypeError, ValueError, OverflowError):
        return None


class _Builder:
    """Builder that puts everything into streams in the order of correlation ids."""

    def __init__(
        self,
        work: list[tuple[int, str, GraphArgs]],
        syncs: list[tuple[int, str, GraphArgs]],
        rules: Sequence[CommRule],
    ) -> None:
        self.work, self.syncs = work, syncs
        self.graph = Graph()
        self.classifier = Classifier(rules)
        self.tail: dict[str, int] = {}
        self.records: dict[int, int] = {}
        """Nodes of records by the correlation of the call."""
        self.host: int | None = None
        """Node of the host's last wait: everything issued later is after it."""
        self.num_unknown = 0

    def build(self) -> Graph:
        # A record has no event of its own: its stream and call are told by the waits on it.
        recorded = {
            call: str(args.wait_on_stream)
            for _, name, args in self.syncs
            if name in (STREAM_WAIT, EVENT_SYNC)
            and (call := _integer(args.recorded)) is not None
            and call >= 0
            and (stream := _integer(args.wait_on_stream)) is not None
            and stream >= 0
        }
        issued: list[tuple[int, int, str, object]] = [
            (call, 0, "record", event) for call, event in recorded.items()
        ]
        issued += [(correlation, 1, name, args) for correlation, name, args in self.syncs]
        issued += [(correlation, 2, name, args) for correlation, name, args in self.work]
        for correlation, kind, name, detail in sorted(issued, key=lambda row: row[:2]):
            if isinstance(detail, GraphArgs):
                self.sync(name, detail) if kind == 1 else self.operation(name, detail)
            else:
                self.records[correlation] = self.append(Node("record", str(detail)))
        if self.num_unknown:
            self.graph.warnings.append(
                f"{self.num_unknown} waits name no record of this trace (recorded before it began, "
                "or not told): their dependencies are missing"
            )
        return self.graph

    def operation(self, name: str, args: GraphArgs) -> None:
        is_comm = self.classifier.comm_op(name) is not None
        self.append(Node(name, str(args.stream), is_data=True, is_communication=is_comm))

    def sync(self, name: str, args: GraphArgs) -> None:
        if name == STREAM_WAIT:
            recorded = self.records.get(_integer(args.recorded) or -1)
            self.num_unknown += recorded is None
            self.append(Node("wait", str(args.stream)), recorded)
        elif name == EVENT_SYNC:
            recorded = self.records.get(_integer(args.recorded) or -1)
            if recorded is not None:
                self.host_waits([recorded])
        elif name == STREAM_SYNC:
            self.host_waits([self.tail[stream] for stream in (str(args.stream),) if stream in self.tail])
        else:
            self.host_waits(list(self.tail.values()))

    def host_waits(self, nodes: list[int]) -> None:
        predecessors: list[tuple[int, Why]] = [(node, "event") for node in nodes]
        if self.host is not None:
            predecessors.append((self.host, "stream"))
        self.host = self.graph.add(Node("host waits", "host"), predecessors)

    def append(self, node: Node, waits_for: int | None = None) -> int:
        predecessors: list[tuple[int, Why]] = []
        if node.stream in self.tail:
            predecessors.append((self.tail[node.stream], "stream"))
        if waits_for is not None:
            predecessors.append((waits_for, "event"))
        if self.host is not None:
            predecessors.append((self.host, "event"))
        self.tail[node.stream] = self.graph.add(node, predecessors)
        return self.tail[node.stream]
