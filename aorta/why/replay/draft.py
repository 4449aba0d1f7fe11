"""A draft of a graph's lengths and arcs: what a change edits before the graph is replayed."""

from dataclasses import dataclass, field

from aorta.why.replay.contention import Contention, contention
from aorta.why.replay.graph import ArcKind, Arcs, NodeKind, StepEnd, TracedCollective, TraceGraph

NEVER = float("-inf")
"""Length of an arc that asks for nothing."""


@dataclass(slots=True)
class Draft:
    """Lengths and arcs of a graph that changes edit; the graph itself is never changed."""

    graph: TraceGraph
    length_ns: list[float]
    """Length of each arc of the graph."""
    contention: Contention
    extra: Arcs = field(default_factory=Arcs)
    """Arcs that changes add."""
    has_contention: bool = True
    notes: list[str] = field(default_factory=list)
    """Things that a change could not do, or assumed."""

    @classmethod
    def as_measured(cls, graph: TraceGraph) -> "Draft":
        """Kernels as long as they were, whatever runs beside them: for changes that hardly move them."""
        return cls(graph, list(graph.arcs.length_ns), contention(graph), has_contention=False)

    def copy(self) -> "Draft":
        """The same lengths, with arcs of its own."""
        old = self.extra
        extra = Arcs(list(old.source), list(old.target), list(old.length_ns), list(old.kind))
        return Draft(
            self.graph, list(self.length_ns), self.contention, extra, self.has_contention, list(self.notes)
        )

    @property
    def is_unchanged(self) -> bool:
        return self.has_contention and not len(self.extra) and self.length_ns == self.contention.length_ns

    def incoming(self, point: int, kind: ArcKind | None = None) -> list[int]:
        """Arcs to a point, of one kind or all."""
        graph = self.graph
        arcs = graph.arcs_by_target[graph.first_arc[point] : graph.first_arc[point + 1]]
        return arcs if kind is None else [arc for arc in arcs if graph.arcs.kind[arc] == kind]

    def scale(self, arc: int, factor: float) -> None:
        """Multiplies a length that is positive: a negative one is an overlap of clocks, no time."""
        if self.length_ns[arc] > 0:
            self.length_ns[arc] *= factor

    def cut(self, arc: int) -> None:
        self.length_ns[arc] = NEVER

    def cut_to(self, arc: int, most_ns: float) -> None:
        self.length_ns[arc] = min(self.length_ns[arc], most_ns)

    def add(self, source: int, target: int, length_ns: float, kind: ArcKind) -> None:
        self.extra.add(source, target, length_ns, kind)

    def duration_arcs(self, node: int) -> list[int]:
        """Arcs that decide the length of device work: of a collective with a meeting, its transfer."""
        return self.incoming(2 * node + 1, ArcKind.DURATION) + self.incoming(2 * node + 1, ArcKind.TRANSFER)

    def duration_ns(self, node: int) -> float:
        return max((self.length_ns[arc] for arc in self.duration_arcs(node)), default=0.0)

    def set_duration(self, node: int, length_ns: float) -> None:
        """Set the length of device work; of a collective with a meeting, of its transfer alone."""
        arcs = self.incoming(2 * node + 1, ArcKind.TRANSFER) or self.incoming(2 * node + 1, ArcKind.DURATION)
        for arc in arcs:
            self.length_ns[arc] = length_ns

    def take_out(self, node: int) -> None:
        """Let device work take no time, nor what launching it costs the host."""
        self.set_duration(node, 0.0)
        for arc in self.incoming(2 * node, ArcKind.LAUNCH):
            for host in self.host_arcs(self.graph.arcs.source[arc] // 2):
                self.cut_to(host, 0.0)

    def host_arcs(self, node: int) -> list[int]:
        """The program before a host call, and the call itself."""
        return self.incoming(2 * node, ArcKind.HOST) + self.incoming(2 * node + 1, ArcKind.CALL)

    def calls(self) -> list[int]:
        """Nodes of host calls."""
        return [node for node, kind in enumerate(self.graph.nodes.kind) if kind == NodeKind.CALL]

    def device_work(self) -> list[int]:
        """Nodes of kernels and copies, collectives left out."""
        return [
            node
            for node, kind in enumerate(self.graph.nodes.kind)
            if kind in (NodeKind.KERNEL, NodeKind.COPY)
        ]

    def collectives(
        self, ops: frozenset[str] | None = None, unit: str | None = None
    ) -> list[TracedCollective]:
        """Collectives of these operations, or all. unit: how the name of theirs begins."""
        return [
            collective
            for collective in self.graph.collectives
            if (ops is None or collective.op in ops) and (unit is None or collective.unit.startswith(unit))
        ]

    def step_ends(self) -> list[StepEnd]:
        return [end for _, ends in self.graph.steps for end in ends]
