"""Replays a graph: the time of every point from lengths and dependencies alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from aorta.errors import TraceError
from aorta.replay.graph import Arcs, StepGraph, TraceGraph, indexed_by_target, topological

if TYPE_CHECKING:
    from aorta.replay.changes import Change

NEVER = float("-inf")


@dataclass(slots=True)
class Draft:
    """A graph's arcs that changes may edit; the graph itself stays as it is."""

    graph: TraceGraph
    length_ns: list[float]
    """By arc; NEVER takes an arc out."""
    extra: Arcs
    notes: list[str]

    @classmethod
    def of(cls, graph: TraceGraph) -> "Draft":
        return cls(graph, list(graph.arcs.length_ns), Arcs(), [])


@dataclass(frozen=True, slots=True)
class Replayed:
    """Times of all points of a graph, with changes or as it is."""

    step: StepGraph
    time_ns: list[float]
    """By point, from the graph's zero."""
    arcs: Arcs
    length_ns: list[float]
    first_arc: list[int]
    arcs_by_target: list[int]
    notes: tuple[str, ...] = ()

    def step_ms(self, rank: int) -> float:
        """Length of the replayed step on the rank."""
        end = next(end for end in self.step.ends if end.rank == rank)
        return (self.time_ns[end.last] - self.time_ns[end.first]) / 1e6

    @property
    def slowest_ms(self) -> float:
        return max(self.step_ms(end.rank) for end in self.step.ends)

    def error(self, rank: int) -> float:
        """Replayed step over the measured one, less 1."""
        return self.step_ms(rank) / self.step.measured_ms(rank) - 1

    def at(self, step: StepGraph) -> "Replayed":
        """The same replay, seen for another step of the same trace."""
        return Replayed(
            step, self.time_ns, self.arcs, self.length_ns, self.first_arc, self.arcs_by_target, self.notes
        )


def replay(step: StepGraph, changes: "Sequence[Change]" = ()) -> Replayed:
    """Times of all nodes with these changes applied to every traced step."""
    graph = step.trace
    draft = Draft.of(graph)
    for change in changes:
        change.apply(draft)
    arcs, lengths, order = graph.arcs, draft.length_ns, graph.order
    first, by_target = graph.first_arc, graph.arcs_by_target
    if len(draft.extra):
        arcs = Arcs(
            graph.arcs.source + draft.extra.source,
            graph.arcs.target + draft.extra.target,
            graph.arcs.length_ns + draft.extra.length_ns,
            graph.arcs.kind + draft.extra.kind,
        )
        lengths = lengths + draft.extra.length_ns
        num_points = 2 * len(graph.nodes)
        live = np.flatnonzero(np.array(lengths) != NEVER)
        kept = Arcs(
            [arcs.source[i] for i in live], [arcs.target[i] for i in live],
            [lengths[i] for i in live], [arcs.kind[i] for i in live],
        )  # fmt: skip
        changed = topological(kept, num_points)
        if changed is None:
            raise TraceError("these changes contradict the order of the program: they form a circle")
        order = changed
        first, by_target = indexed_by_target(arcs, num_points)
    times = _evaluate(arcs, lengths, order, first, by_target)
    return Replayed(step, times, arcs, lengths, first, by_target, tuple(draft.notes))


def _evaluate(
    arcs: Arcs, lengths: list[float], order: list[int], first: list[int], by_target: list[int]
) -> list[float]:
    source = arcs.source
    times = [0.0] * len(order)
    for point in order:
        begin, end = first[point], first[point + 1]
        if begin == end:
            continue
        latest = NEVER
        for k in range(begin, end):
            arc = by_target[k]
            time = times[source[arc]] + lengths[arc]
            if time > latest:
                latest = time
        times[point] = latest if latest != NEVER else 0.0
    return times
