"""Replays a graph: the time of every point from lengths and dependencies alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from aorta.errors import ReplayError
from aorta.replay.contended import contended_times
from aorta.replay.draft import NEVER, Draft
from aorta.replay.graph import ArcKind, Arcs, NodeKind, StepEnd, StepGraph, indexed_by_target

if TYPE_CHECKING:
    from aorta.replay.changes.change import Change


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
        """Replayed step over the measured one, less 1. ReplayError where the trace gives it no time."""
        measured_ms = self.step.measured_ms(rank)
        if not measured_ms > 0:
            raise ReplayError(
                f"the traced step of rank {rank} takes {measured_ms:g} ms: there is no time to replay"
            )
        return self.step_ms(rank) / measured_ms - 1

    def of_step(self, step: StepGraph) -> "Replayed":
        """The same replay, seen for another step of the same trace."""
        return Replayed(
            step, self.time_ns, self.arcs, self.length_ns, self.first_arc, self.arcs_by_target, self.notes
        )


def replay(step: StepGraph, changes: "Sequence[Change]" = ()) -> Replayed:
    """Times of all nodes with these changes applied to every traced step."""
    return replay_draft(step, drafted(step, changes))


def drafted(step: StepGraph, changes: "Sequence[Change]", *, has_contention: bool = True) -> Draft:
    """The lengths of the step's graph with these changes. Without contention kernels stay as measured,
    whatever comes to run beside them: four times as quick to replay."""
    draft = Draft.from_graph(step.trace) if has_contention else Draft.as_measured(step.trace)
    for change in changes:
        change.apply(draft)
    return draft


def replay_draft(step: StepGraph, draft: Draft) -> Replayed:
    """Times of all nodes with the lengths and arcs of a draft."""
    graph = step.trace
    if draft.is_unchanged:
        return _unchanged(step, draft)
    arcs, lengths = graph.arcs, list(draft.length_ns)
    first, by_target = graph.first_arc, graph.arcs_by_target
    if len(draft.extra):
        arcs = Arcs(
            graph.arcs.source + draft.extra.source,
            graph.arcs.target + draft.extra.target,
            graph.arcs.length_ns + draft.extra.length_ns,
            graph.arcs.kind + draft.extra.kind,
        )
        lengths += draft.extra.length_ns
        first, by_target = indexed_by_target(arcs, 2 * len(graph.nodes))
    if not draft.has_contention and not len(draft.extra):
        plain = _evaluate(arcs, lengths, graph.order, first, by_target)
        return Replayed(step, plain, arcs, lengths, first, by_target, tuple(draft.notes))
    of_graph = draft.contention if draft.has_contention else None
    times = contended_times(graph, arcs, lengths, of_graph)
    if times is None:
        raise ReplayError("these changes contradict the order of the program: work would wait for itself")
    return Replayed(step, times, arcs, lengths, first, by_target, tuple(draft.notes))


def _unchanged(step: StepGraph, draft: Draft) -> Replayed:
    graph = step.trace
    arcs, first, by_target = graph.arcs, graph.first_arc, graph.arcs_by_target
    if graph.times_ns is None:
        graph.times_ns = _evaluate(arcs, arcs.length_ns, graph.order, first, by_target)
    return Replayed(step, graph.times_ns, arcs, arcs.length_ns, first, by_target, tuple(draft.notes))


def host_floor_ms(step: StepGraph, draft: Draft) -> float:
    """What the slowest host needs for the step if it never waits for the device: no steady step is shorter,
    though a few may be while the device works off what was launched before."""
    floor, lengths = 0.0, np.array(draft.length_ns)
    for end in step.ends:
        chain = _host_chain(draft, end)
        if chain is not None:
            arcs, is_call = chain
            along = lengths[arcs]
            floor = max(floor, float(np.where(is_call, np.maximum(along, 0.0), along).sum()) / 1e6)
    return floor


def _host_chain(draft: Draft, end: StepEnd) -> "tuple[NDArray[np.int64], NDArray[np.bool_]] | None":
    """Arcs of the host's line from the step's beginning to its end, and which of them are calls; None where
    the line is broken. Changes edit lengths alone, so it is followed once."""
    graph = draft.graph
    key = (end.first, end.last)
    if key not in graph.host_chains:
        first, point = (_host_point(draft, point) for point in key)
        arcs: list[int] = []
        is_call: list[bool] = []
        while point is not None and point != first:
            arc = graph.host_arcs.get(point)
            if arc is None:
                point = None
                break
            arcs.append(arc)
            is_call.append(point % 2 == 1)
            point = graph.arcs.source[arc]
        is_whole = first is not None and point is not None
        graph.host_chains[key] = (
            (np.array(arcs, dtype=np.int64), np.array(is_call, dtype=np.bool_)) if is_whole else None
        )
    return graph.host_chains[key]


def _host_point(draft: Draft, point: int) -> int | None:
    """The start of the HOST_STEP node at which a step begins."""
    arcs, nodes = draft.graph.arcs, draft.graph.nodes
    sources = [arcs.source[arc] // 2 for arc in draft.incoming(point, ArcKind.STEP)]
    return next((2 * node for node in sources if nodes.kind[node] == NodeKind.HOST_STEP), None)


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
