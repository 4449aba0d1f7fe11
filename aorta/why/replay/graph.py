"""The dependency graph of traced steps over all ranks.

A node is a host call, a device activity, the meeting of a collective, or the moment at which a step begins on
the host or on the device. Each node has two points, its start (2 * node) and its end (2 * node + 1). An arc
says that a point comes no earlier than another one plus a length in ns; a point's time is the latest that its
arcs ask for. Lengths are durations, host time between calls, launch latencies and the gaps between kernels of
a stream, never times.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np

from aorta.timeline.arrays import Flags, Ints


class NodeKind(IntEnum):
    ROOT = 0
    """The moment before everything."""
    CALL = 1
    """A host call that starts device work or waits for it."""
    KERNEL = 2
    COLLECTIVE = 3
    """The kernel of a collective on one rank."""
    COPY = 4
    MEETING = 5
    """The moment at which all ranks of a collective have arrived."""
    HOST_STEP = 6
    """The host begins a step."""
    STEP = 7
    """The device has reached a step: its host began, and the compute stream's earlier work is done."""


class ArcKind(IntEnum):
    BEGIN = 0
    """A measured time, for what the trace begins with."""
    HOST = 1
    """The program on the host between two calls."""
    CALL = 2
    """Inside a host call."""
    LAUNCH = 3
    """Launch latency: a call to its work."""
    STREAM = 4
    """Order of a stream: one work to the next."""
    EVENT = 5
    """Work waits for work of another stream."""
    DURATION = 6
    """A kernel or a copy."""
    ARRIVAL = 7
    """A rank's kernel has started: it has come to its collective."""
    TRANSFER = 8
    """The transfer of a collective: its meeting to its end on a rank."""
    SYNC = 9
    """The host waits for device work."""
    QUEUE = 10
    """A launch waits for room in the queue of launches."""
    STEP = 11
    """An arc to the beginning of a step."""


@dataclass(slots=True)
class Arcs:
    """Arcs as columns, any order."""

    source: list[int] = field(default_factory=list)
    target: list[int] = field(default_factory=list)
    length_ns: list[float] = field(default_factory=list)
    kind: list[int] = field(default_factory=list)

    def add(self, source: int, target: int, length_ns: float, kind: ArcKind) -> int:
        self.source.append(source)
        self.target.append(target)
        self.length_ns.append(length_ns)
        self.kind.append(kind)
        return len(self.source) - 1

    def __len__(self) -> int:
        return len(self.source)


@dataclass(frozen=True, slots=True)
class TracedCollective:
    """A collective, with its nodes on the ranks of its group."""

    op: str
    unit: str
    """'blocks.3'; '' where nothing names it."""
    members: tuple[int, ...]
    """Nodes, one per rank that was traced."""
    meeting: int
    """Node; -1 where only one rank's side is there."""
    size_bytes: int | None
    num_ranks: int | None
    """Number of ranks in the group."""
    group: str | None
    step: int
    """Index of the step that launched it, -1 for none."""

    @property
    def subject(self) -> str:
        """'all_gather (blocks.3)'"""
        return f"{self.op} ({self.unit})" if self.unit else self.op


@dataclass(frozen=True, slots=True)
class StepEnd:
    """Begin and end of a step on one rank: points of STEP nodes."""

    rank: int
    first: int
    last: int


@dataclass(slots=True)
class Nodes:
    """Columns, one row per node."""

    kind: list[int] = field(default_factory=list)
    rank: list[int] = field(default_factory=list)
    name: list[str] = field(default_factory=list)
    lane: list[str] = field(default_factory=list)
    """Stream or thread."""
    shape: list[str] = field(default_factory=list)
    step: list[int] = field(default_factory=list)
    start_ns: list[float] = field(default_factory=list)
    """Measured, on the common clock, as end_ns; what a replay is compared with, and what it never reads."""
    end_ns: list[float] = field(default_factory=list)
    program: list[str] = field(default_factory=list)
    """For calls, the part of the program that the host ran before; for device work, what launched it."""
    unit: list[str] = field(default_factory=list)
    """Annotation around the launch of device work."""

    def add(
        self, kind: NodeKind, rank: int, name: str, lane: str, start_ns: float, end_ns: float,
        *, shape: str = "", step: int = -1, program: str = "", unit: str = "",
    ) -> int:  # fmt: skip
        self.kind.append(kind)
        self.rank.append(rank)
        self.name.append(name)
        self.lane.append(lane)
        self.shape.append(shape)
        self.step.append(step)
        self.start_ns.append(start_ns)
        self.end_ns.append(end_ns)
        self.program.append(program)
        self.unit.append(unit)
        return len(self.kind) - 1

    def extend(
        self, kind: Sequence[int], rank: int, name: Sequence[str], lane: Sequence[str],
        start_ns: Sequence[float], end_ns: Sequence[float], shape: Sequence[str], step: Sequence[int],
    ) -> range:  # fmt: skip
        """Adds rows of one rank at once, of no program and no unit yet; their numbers."""
        first, num = len(self.kind), len(kind)
        self.kind += kind
        self.rank += [rank] * num
        self.name += name
        self.lane += lane
        self.shape += shape
        self.step += step
        self.start_ns += start_ns
        self.end_ns += end_ns
        self.program += [""] * num
        self.unit += [""] * num
        return range(first, first + num)

    def __len__(self) -> int:
        return len(self.kind)


@dataclass(slots=True, eq=False, weakref_slot=True)
class TraceGraph:
    """The traced steps of all ranks as one graph, because a step begins with what the one before left."""

    ranks: tuple[int, ...]
    nodes: Nodes
    arcs: Arcs
    order: list[int]
    """Points so that every arc goes forward."""
    first_arc: list[int]
    """Index in arcs_by_target of each point's first arc; one entry more than there are points."""
    arcs_by_target: list[int]
    collectives: list[TracedCollective]
    collective_of: dict[int, int]
    """Node -> place in collectives."""
    steps: list[tuple[int | None, tuple[StepEnd, ...]]]
    """Number of the step, and its ends on every rank."""
    num_recorded_edges: int = 0
    num_inferred_edges: int = 0
    unexplained: dict[int, float] = field(default_factory=dict)
    """Device work that starts late though nothing says why: node and delay in ns, which stays in its arcs."""
    roomless: dict[int, float] = field(default_factory=dict)
    """Device work that starts late while kernels of another stream fill the device: node and delay in ns."""
    clock_error_us: float | None = None
    host_events: float = 0.0
    """Host events that the profiler recorded in a step, of the rank with most."""
    host_arcs: dict[int, int] = field(default_factory=dict)
    """Points of the host's lines, and the arc from the point before."""
    host_chains: dict[tuple[int, int], tuple[Ints, Flags] | None] = field(default_factory=dict)
    """Cache of the host's line of a step, by first and last point of its StepEnd: its arcs, and which of
    them are calls."""
    times_ns: list[float] | None = None
    """Cache of the unchanged replay: the time of each point."""
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class StepGraph:
    """A step of a TraceGraph."""

    trace: TraceGraph
    index: int
    """Place in TraceGraph.steps."""

    @property
    def number(self) -> int | None:
        return self.trace.steps[self.index][0]

    @property
    def ends(self) -> tuple[StepEnd, ...]:
        return self.trace.steps[self.index][1]

    def measured_ms(self, rank: int) -> float:
        """Length of the step on the rank, as the trace has it."""
        end = next(end for end in self.ends if end.rank == rank)
        nodes = self.trace.nodes
        return (nodes.start_ns[end.last // 2] - nodes.start_ns[end.first // 2]) / 1e6


def indexed_by_target(arcs: Arcs, num_points: int) -> tuple[list[int], list[int]]:
    """first_arc and arcs_by_target of a TraceGraph."""
    return _grouped(arcs.target, num_points)


def _grouped(points: Sequence[int], num_points: int) -> tuple[list[int], list[int]]:
    """Arcs by their point, and where in that list those of each point begin."""
    point = np.array(points, dtype=np.int64)
    first = np.zeros(num_points + 1, dtype=np.int64)
    np.cumsum(np.bincount(point, minlength=num_points), out=first[1:])
    return first.tolist(), np.argsort(point, kind="stable").tolist()


def topological(arcs: Arcs, num_points: int) -> list[int] | None:
    """Points in an order in which every arc goes forward; None where arcs form a circle."""
    starts, by_source = _grouped(arcs.source, num_points)
    num_before = np.bincount(np.array(arcs.target, dtype=np.int64), minlength=num_points).tolist()
    ready = [point for point in range(num_points) if num_before[point] == 0]
    order: list[int] = []
    target = arcs.target
    while ready:
        point = ready.pop()
        order.append(point)
        for k in range(starts[point], starts[point + 1]):
            successor = target[by_source[k]]
            num_before[successor] -= 1
            if num_before[successor] == 0:
                ready.append(successor)
    return order if len(order) == num_points else None
