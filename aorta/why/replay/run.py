"""Replays the graph of traced steps: the time of every point, from lengths and dependencies alone.

Without contention the points are evaluated in one pass, in topological order. With it, kernels run slower
while a collective runs on their rank, so their ends depend on what happens meanwhile: _Run then simulates the
graph with a queue of events.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

from aorta.errors import ReplayError
from aorta.timeline.arrays import Flags, Ints
from aorta.why.replay.changes.change import Change
from aorta.why.replay.contention import Contention, contention
from aorta.why.replay.draft import NEVER, Draft
from aorta.why.replay.graph import (
    ArcKind,
    Arcs,
    NodeKind,
    StepEnd,
    StepGraph,
    TraceGraph,
    indexed_by_target,
)

END, BEGIN, DONE, START = range(4)
"""Kinds of events, in the order in which events of equal time happen."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """Times of all points of a graph, with changes or as it is."""

    step: StepGraph
    time_ns: list[float]
    """Time of each point, from the graph's zero."""
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


# ---- the replay of a step ------------------------------------------------------------------------


def replay(step: StepGraph, changes: Sequence[Change] = ()) -> Replayed:
    """Times of all nodes with these changes applied to every traced step."""
    return replay_draft(step, drafted(step, changes))


def drafted(step: StepGraph, changes: Sequence[Change]) -> Draft:
    """The lengths of the step's graph with these changes."""
    slowdown = contention(step.trace)
    draft = Draft(step.trace, list(slowdown.length_ns), slowdown)
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
    slowdown = draft.contention if draft.has_contention else None
    times = contended_times(graph, arcs, lengths, slowdown)
    if times is None:
        raise ReplayError("these changes contradict the order of the program: work would wait for itself")
    return Replayed(step, times, arcs, lengths, first, by_target, tuple(draft.notes))


def _unchanged(step: StepGraph, draft: Draft) -> Replayed:
    graph = step.trace
    arcs, first, by_target = graph.arcs, graph.first_arc, graph.arcs_by_target
    if graph.times_ns is None:
        graph.times_ns = _evaluate(arcs, arcs.length_ns, graph.order, first, by_target)
    return Replayed(step, graph.times_ns, arcs, arcs.length_ns, first, by_target, tuple(draft.notes))


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


# ---- times with kernels that run slower beside collectives ---------------------------------------


def contended_times(
    graph: TraceGraph, arcs: Arcs, lengths: list[float], slowdown: Contention | None
) -> list[float] | None:
    """Time of each point; None if arcs form a circle.

    lengths: by arc, with kernels as long as they are alone; overwritten with their lengths beside
    collectives. They stay as they are without a Contention.
    """
    run = _Run(graph, arcs, lengths, slowdown)
    return run.times if run.is_whole() else None


def _switches(graph: TraceGraph) -> list[int]:
    """For each point 1 + rank where a collective of that rank begins, the negative where it ends, else 0."""
    switches = [0] * (2 * len(graph.nodes))
    for collective in graph.collectives:
        for node in collective.members:
            switches[2 * node], switches[2 * node + 1] = (
                1 + graph.nodes.rank[node],
                -1 - graph.nodes.rank[node],
            )
    return switches


class _Run:
    def __init__(
        self, graph: TraceGraph, arcs: Arcs, lengths: list[float], slowdown: Contention | None
    ) -> None:
        num_points = 2 * len(graph.nodes)
        self.lengths = lengths
        length = np.array(lengths)
        source, target = np.array(arcs.source), np.array(arcs.target)
        live = np.flatnonzero(length != NEVER)
        order = live[np.argsort(source[live], kind="stable")]
        self.first = np.searchsorted(source[order], np.arange(num_points + 1)).tolist()
        self.target, self.length = target[order].tolist(), length[order].tolist()
        work = np.full(len(length), -1)
        self.switch = [0] * num_points
        if slowdown is not None:
            self.kernel_arcs = slowdown.arcs.tolist()
            self.speed = (1.0 - slowdown.rates).tolist()
            self.rank = slowdown.rank.tolist()
            self.end_point = (2 * slowdown.nodes + 1).tolist()
            is_slowed = (slowdown.rates > 0) & (length[slowdown.arcs] > 0)
            work[slowdown.arcs[is_slowed]] = np.flatnonzero(is_slowed)
            if is_slowed.any():
                self.switch = _switches(graph)
        self.work = work[order].tolist()
        self.left = np.bincount(target[live], minlength=num_points).tolist()
        self.latest = [NEVER] * num_points
        self.times = [0.0] * num_points
        self.events: list[tuple[float, int, int, int]] = []
        self.num_beside: dict[int, int] = defaultdict(int)
        self.running: dict[int, set[int]] = defaultdict(set)
        num_kernels = 0 if slowdown is None else len(slowdown.nodes)
        self.rest = [0.0] * num_kernels
        """Work left of each running kernel at the time `since`, in ns at full speed."""
        self.since = [0.0] * num_kernels
        self.version = [0] * num_kernels
        """How often the end of each kernel was predicted: an event of an earlier version is void."""
        self.began = [0.0] * num_kernels
        self._follow = self._follower()
        self._follow([point for point, num in enumerate(self.left) if num == 0])
        self._go_on()

    def is_whole(self) -> bool:
        return not any(self.left)

    def _follower(self) -> Callable[[list[int]], None]:
        """A function that gives times to everything that follows some points, up to kernels, whose ends
        depend on what runs beside them. A closure with local names, because a replay calls it for every
        kernel; the lists are changed in place and never replaced."""
        times, latest, left, target, length = self.times, self.latest, self.left, self.target, self.length
        first, work, switch, events = self.first, self.work, self.switch, self.events

        def follow(points: list[int]) -> None:
            while points:
                point = points.pop()
                time = times[point]
                for k in range(first[point], first[point + 1]):
                    if work[k] >= 0:
                        heappush(events, (time, START, work[k], 0))
                        continue
                    following = target[k]
                    reached_ns = time + length[k]
                    if reached_ns > latest[following]:
                        latest[following] = reached_ns
                    left[following] -= 1
                    if left[following] == 0:
                        times[following] = latest[following]
                        points.append(following)
                if switch[point]:
                    heappush(events, (time, BEGIN if switch[point] > 0 else END, abs(switch[point]) - 1, 0))

        return follow

    def _go_on(self) -> None:
        while self.events:
            time, kind, which, version = heappop(self.events)
            if kind == START:
                self._start(which, time)
            elif kind == DONE:
                if version == self.version[which]:  # else its speed has changed since this end was predicted
                    self._end(which, time)
            else:
                # Speeds change only with the first collective to begin and the last one to end.
                num = self.num_beside[which] = self.num_beside[which] + (1 if kind == BEGIN else -1)
                if num == (1 if kind == BEGIN else 0):
                    self._change_speed(which, time)

    def _start(self, kernel: int, time: float) -> None:
        rank, length = self.rank[kernel], self.lengths[self.kernel_arcs[kernel]]
        end = time + (length / self.speed[kernel] if self.num_beside[rank] else length)
        # Most kernels end before anything else happens: they never enter the queue.
        if not self.events or end <= self.events[0][0]:
            self.lengths[self.kernel_arcs[kernel]] = end - time
            self._arrive(kernel, end)
            return
        self.running[rank].add(kernel)
        self.began[kernel] = self.since[kernel] = time
        self.rest[kernel] = length
        heappush(self.events, (end, DONE, kernel, self.version[kernel]))

    def _change_speed(self, rank: int, time: float) -> None:
        """Settle the work done so far at the old speed, and predict new ends."""
        for kernel in self.running[rank]:
            before = 1.0 if self.num_beside[rank] > 0 else self.speed[kernel]
            past = max(0.0, time - self.since[kernel])
            self.rest[kernel] = max(0.0, self.rest[kernel] - past * before)
            self.since[kernel] += past
            self.version[kernel] += 1
            now = self.speed[kernel] if self.num_beside[rank] > 0 else 1.0
            end = self.since[kernel] + self.rest[kernel] / now
            heappush(self.events, (end, DONE, kernel, self.version[kernel]))

    def _end(self, kernel: int, time: float) -> None:
        self.running[self.rank[kernel]].discard(kernel)
        self.lengths[self.kernel_arcs[kernel]] = time - self.began[kernel]
        self._arrive(kernel, time)

    def _arrive(self, kernel: int, time: float) -> None:
        """Pass on the end of a kernel to what waits for it."""
        point = self.end_point[kernel]
        self.latest[point] = max(self.latest[point], time)
        self.left[point] -= 1
        if self.left[point] == 0:
            self.times[point] = self.latest[point]
            self._follow([point])


# ---- the host alone ------------------------------------------------------------------------------


def host_floor_ms(step: StepGraph, draft: Draft) -> float:
    """Time that the slowest host needs for the step if it never waits for the device. No steady step is
    shorter, though a few may be while the device works off what was launched before."""
    floor, lengths = 0.0, np.array(draft.length_ns)
    for end in step.ends:
        chain = _host_chain(draft, end)
        if chain is not None:
            arcs, is_call = chain
            arc_ns = lengths[arcs]
            floor = max(floor, float(np.where(is_call, np.maximum(arc_ns, 0.0), arc_ns).sum()) / 1e6)
    return floor


def _host_chain(draft: Draft, end: StepEnd) -> "tuple[Ints, Flags] | None":
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
