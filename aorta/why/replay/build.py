"""Builds the dependency graph of traced steps from the activity of all ranks."""

import math
import re
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from aorta.errors import TraceError
from aorta.timeline.arrays import Ints
from aorta.timeline.collective import POINT_TO_POINT
from aorta.timeline.matching import RankCalls
from aorta.timeline.waits import RankView
from aorta.traces.host_spans import is_data_loading, may_be_awaited
from aorta.why.replay.activity import CallKind, RankActivity, StepAnnotation, WorkKind
from aorta.why.replay.graph import (
    ArcKind,
    Arcs,
    NodeKind,
    Nodes,
    StepEnd,
    TracedCollective,
    TraceGraph,
    indexed_by_target,
    topological,
)
from aorta.why.replay.streams import BLOCKED_NS, EARLY_NS, Dependencies, dependencies

UNEXPLAINED_NS = 20_000
"""A start later than this after everything it waits for is counted as unexplained."""
QUEUE_FULL_NS = 100_000
"""A launch that takes at least this long may wait for room in the queue,"""
QUEUE_PENDING = 100
"""if at least so much launched work had not started."""
FILLED = 0.8
"""Share of a delay in which a kernel of another stream ran, for it to be a wait for room on the device."""
MOST_SWITCHES = 0.1
"""Largest share of a thread's calls at which control passes between two threads that take turns."""
RETURN_NS = 5_000
"""Typical ns from the end of device work to the return of a host call that waits for it but found it done."""
LONG_GAP_NS = 1_000_000
"""Gap between two calls whose cause is looked up at its middle, to find a data loader. Reading a batch
starts no device work."""
ONE_WAY = frozenset(("broadcast", "scatter", "reduce", "gather", "send"))
"""Operations that a rank with nothing to receive may leave before the others have come."""
UNIT = re.compile(r"\(([^()]+)\)\s*$")
WRITTEN_AS = {"aten::_local_scalar_dense": "aten::item"}
"""Operators under the name that a program calls them by."""
WORK_NODE = {
    WorkKind.COMPUTE: NodeKind.KERNEL, WorkKind.COMM: NodeKind.COLLECTIVE, WorkKind.COPY: NodeKind.COPY,
}  # fmt: skip


def build(
    activities: Sequence[RankActivity], calls: Sequence[RankCalls], view: RankView | None
) -> TraceGraph:
    """The graph of these ranks. calls and view: their collectives, matched, in the same order of ranks."""
    return _Builder(activities, calls, view).build()


class _Rank:
    """Nodes of one rank."""

    def __init__(self, row: int, activity: RankActivity, dependencies: Dependencies) -> None:
        self.row, self.activity, self.dependencies = row, activity, dependencies
        self.node_of_work: list[int] = []
        self.node_of_call: dict[int, int] = {}
        self.filled = _Filled()
        self.host_steps: list[tuple[int, int]] = []
        """HOST_STEP nodes: number of the step, node."""
        self.begins_ns = -math.inf
        """When the first work runs that was launched in the trace."""


class _Filled:
    """Time in which kernels of other streams ran."""

    def __init__(self) -> None:
        self.starts: dict[str, list[float]] = defaultdict(list)
        self.ends: dict[str, list[float]] = defaultdict(list)
        self.busy: dict[str, list[float]] = defaultdict(lambda: [0.0])

    def add(self, stream: str, start: float, end: float) -> None:
        """Add a kernel; kernels come in order of their starts."""
        self.starts[stream].append(start)
        self.ends[stream].append(end)
        self.busy[stream].append(self.busy[stream][-1] + end - start)

    def share(self, stream: str, start: float, end: float) -> float:
        """The largest share of any other stream."""
        shares = [
            self._busy_before(stream_beside, end) - self._busy_before(stream_beside, start)
            for stream_beside in self.starts
            if stream_beside != stream
        ]
        return max(shares, default=0.0) / (end - start)

    def _busy_before(self, stream: str, time: float) -> float:
        num_started = bisect_right(self.starts[stream], time)
        busy = self.busy[stream][num_started]
        return busy - max(0.0, self.ends[stream][num_started - 1] - time) if num_started else 0.0


class _Builder:
    def __init__(
        self, activities: Sequence[RankActivity], calls: Sequence[RankCalls], view: RankView | None
    ) -> None:
        self.activities, self.calls, self.view = activities, calls, view
        self.nodes, self.arcs = Nodes(), Arcs()
        self.collectives: list[TracedCollective] = []
        self.collective_of: dict[int, int] = {}
        self.unexplained: dict[int, float] = {}
        self.roomless: dict[int, float] = {}
        self.num_inferred = self.num_recorded = 0
        self.notes: list[str] = []
        self.zero_ns = 0
        marked = [{mark.step for mark in activity.marks} for activity in activities]
        common = set.intersection(*marked) if marked else set()
        self.step_place = {number: place for place, number in enumerate(sorted(common))}
        """Index of each step that all ranks mark, by its number."""

    def build(self) -> TraceGraph:
        root = self.nodes.add(NodeKind.ROOT, -1, "", "", 0.0, 0.0)
        self.arcs.add(2 * root, 2 * root + 1, 0.0, ArcKind.BEGIN)
        self.zero_ns = min(int(a.work.start_ns[0]) + a.base_ns for a in self.activities)
        ranks = [_Rank(row, a, dependencies(a)) for row, a in enumerate(self.activities)]
        # Collectives connect nodes of all ranks, so every rank's nodes come first. A device arc needs to know
        # whether its work belongs to a matched collective, so those come before the device.
        for rank in ranks:
            self._add_nodes(rank)
        self._add_collectives(ranks)
        for rank in ranks:
            self._add_host(rank)
            self._add_device(rank)
            self._add_syncs(rank)
        steps = self._add_steps(ranks)
        num_points = 2 * len(self.nodes)
        order = topological(self.arcs, num_points)
        if order is None:
            raise TraceError("the traces' orders contradict each other: their dependencies form a circle")
        first, by_target = indexed_by_target(self.arcs, num_points)
        self.notes += _notes_of_ranks(self.activities)
        return TraceGraph(
            ranks=tuple(a.rank for a in self.activities),
            nodes=self.nodes,
            arcs=self.arcs,
            order=order,
            first_arc=first,
            arcs_by_target=by_target,
            collectives=self.collectives,
            collective_of=self.collective_of,
            steps=steps,
            num_recorded_edges=self.num_recorded,
            num_inferred_edges=self.num_inferred,
            unexplained=self.unexplained,
            roomless=self.roomless,
            clock_error_us=None if self.view is None else self.view.clock.residual_us,
            host_arcs={
                self.arcs.target[arc]: arc
                for arc, kind in enumerate(self.arcs.kind)
                if kind in (ArcKind.HOST, ArcKind.CALL)
            },
            host_events=max(a.host_events for a in self.activities),
            notes=self.notes,
        )

    # ---- nodes ---------------------------------------------------------------------------------

    def _common(self, row: int, time_ns: np.ndarray) -> list[float]:
        """Times of the rank as ns from zero_ns on the common clock."""
        activity = self.activities[row]
        unix = time_ns + activity.base_ns
        if self.view is None:
            return (unix - self.zero_ns).astype(float).tolist()  # type: ignore[no-any-return]
        clock = self.view.clock
        shift = clock.reference_ns - self.zero_ns
        return (clock.aligned(row, unix) + shift).tolist()  # type: ignore[no-any-return]

    def _add_nodes(self, rank: _Rank) -> None:
        activity, row = rank.activity, rank.row
        calls, work, number = activity.calls, activity.work, activity.rank
        steps = [mark.start_ns for mark in activity.marks]
        ends = [mark.end_ns for mark in activity.marks]
        step_of_call = self._steps_at(activity.marks, calls.start_ns)
        call_start, call_end = self._common(row, calls.start_ns), self._common(row, calls.end_ns)
        call_rows = np.flatnonzero(np.isin(calls.kind, (CallKind.LAUNCH, CallKind.SYNC))).tolist()
        places = self.nodes.extend(
            [NodeKind.CALL] * len(call_rows), number, [calls.name[i] for i in call_rows],
            [calls.thread[i] for i in call_rows], [call_start[i] for i in call_rows],
            [call_end[i] for i in call_rows],
            [""] * len(call_rows), [step_of_call[i] for i in call_rows],
        )  # fmt: skip
        rank.node_of_call.update(zip(call_rows, places, strict=True))
        start, end = self._common(row, work.start_ns), self._common(row, work.end_ns)
        kinds = work.kind.tolist()
        rank.node_of_work += self.nodes.extend(
            [WORK_NODE[kind] for kind in kinds], number, work.name, work.stream, start, end, work.shape,
            [step_of_call[call] if call >= 0 else -1 for call in work.call.tolist()],
        )  # fmt: skip
        for i in np.flatnonzero(work.kind == WorkKind.COMPUTE).tolist():
            rank.filled.add(work.stream[i], start[i], end[i])
        mark_ns = self._common(row, np.array([*steps, *ends[-1:]], dtype=np.int64))
        for mark, time in zip([*(m.step for m in activity.marks), -1], mark_ns, strict=bool(steps)):
            node = self.nodes.add(NodeKind.HOST_STEP, number, "step", "host", time, time)
            self.arcs.add(2 * node, 2 * node + 1, 0.0, ArcKind.CALL)
            rank.host_steps.append((mark, node))

    def _steps_at(self, marks: Sequence[StepAnnotation], time_ns: Ints) -> list[int]:
        """The place of the step around each time, -1 where there is none or not all ranks mark it."""
        if not marks:
            return [-1] * len(time_ns)
        starts, ends = (np.array([getattr(m, key) for m in marks]) for key in ("start_ns", "end_ns"))
        step = np.array([self.step_place.get(mark.step, -1) for mark in marks])
        latest = np.searchsorted(starts, time_ns, side="right") - 1
        steps: list[int] = np.where((latest >= 0) & (time_ns < ends[latest]), step[latest], -1).tolist()
        return steps

    # ---- host ----------------------------------------------------------------------------------

    def _add_host(self, rank: _Rank) -> None:
        """Threads that take turns are one line of the program; others are lines of their own."""
        lines = _lines(rank.activity, rank.node_of_call)
        if len(lines) > 1:
            self.notes.append(
                f"rank {rank.activity.rank}: {len(lines)} threads launch side by side, each at its own pace"
            )
        marks = rank.activity.marks
        for line in lines:
            rows = [(self.nodes.start_ns[rank.node_of_call[i]], rank.node_of_call[i]) for i in line]
            main = {rank.activity.calls.thread[i] for i in line}
            if marks and (marks[0].thread in main or len(lines) == 1 or line is lines[0]):
                rows += [(self.nodes.start_ns[node], node) for _, node in rank.host_steps]
                marks = []
            rows.sort()
            previous = None
            for _, node in rows:
                start = self.nodes.start_ns[node]
                if previous is None:
                    self.arcs.add(1, 2 * node, start, ArcKind.BEGIN)
                else:
                    gap = start - self.nodes.end_ns[previous]
                    self.arcs.add(2 * previous + 1, 2 * node, gap, ArcKind.HOST)
                previous = node
        if marks:  # no thread launches: steps begin when they did
            for _, node in rank.host_steps:
                self.arcs.add(1, 2 * node, self.nodes.start_ns[node], ArcKind.BEGIN)
        self._name_programs(rank)

    def _name_programs(self, rank: _Rank) -> None:
        activity, calls = rank.activity, rank.activity.calls
        starts = calls.start_ns.tolist()
        for i, node in rank.node_of_call.items():
            operator, annotation = activity.scopes.innermost(calls.thread[i], starts[i])
            self.nodes.program[node] = _program(operator, annotation)
            self.nodes.unit[node] = annotation or ""
        for i, call in zip(rank.node_of_work, activity.work.call.tolist(), strict=True):
            if call >= 0:
                node = rank.node_of_call[call]
                self.nodes.program[i], self.nodes.unit[i] = self.nodes.program[node], self.nodes.unit[node]
        ended: dict[str, int] = {}
        for i, node in sorted(rank.node_of_call.items(), key=lambda row: starts[row[0]]):
            thread = calls.thread[i]
            since = ended.get(thread, starts[i])
            if starts[i] - since >= LONG_GAP_NS:
                named = _program(*activity.scopes.innermost(thread, (since + starts[i]) // 2))
                if is_data_loading(named):
                    self.nodes.program[node] = named
            ended[thread] = int(calls.end_ns[i])

    # ---- device --------------------------------------------------------------------------------

    def _add_device(self, rank: _Rank) -> None:
        activity, nodes = rank.activity, self.nodes
        work = activity.work
        launch_ns, stream_ns, event_ns = _typical(activity, rank.dependencies)
        linked = np.flatnonzero(work.call >= 0)
        if len(linked):
            rank.begins_ns = nodes.start_ns[rank.node_of_work[int(linked[0])]]
        last: dict[str, int] = {}
        for i, (node, call) in enumerate(zip(rank.node_of_work, work.call.tolist(), strict=True)):
            incoming: list[tuple[int, float, ArcKind]] = []
            if call >= 0:
                incoming.append((2 * rank.node_of_call[call], launch_ns, ArcKind.LAUNCH))
            previous = last.get(work.stream[i])
            if previous is not None:
                incoming.append((2 * rank.node_of_work[previous] + 1, stream_ns, ArcKind.STREAM))
            for producer in rank.dependencies.of_work.get(i, ()):
                incoming.append((2 * rank.node_of_work[producer] + 1, event_ns, ArcKind.EVENT))
                inferred = (producer, i) in rank.dependencies.inferred
                self.num_inferred += inferred
                self.num_recorded += not inferred
            last[work.stream[i]] = i
            start = nodes.start_ns[node]
            if not incoming:
                self.arcs.add(1, 2 * node, start, ArcKind.BEGIN)
            else:
                self._add_start(rank, node, start, incoming)
            if node not in self.collective_of or self.collectives[self.collective_of[node]].meeting < 0:
                self.arcs.add(2 * node, 2 * node + 1, nodes.end_ns[node] - start, ArcKind.DURATION)

    def _add_start(
        self, rank: _Rank, node: int, start: float, incoming: list[tuple[int, float, ArcKind]]
    ) -> None:
        """Arcs whose latest gives the measured start: what is left beyond typical lags is the node's own."""
        times = [self._time(point) for point, _, _ in incoming]
        # Every arc gets the whole delay: whichever of them is the latest after a change, it still holds.
        lags = [min(lag, start - time) for time, (_, lag, _) in zip(times, incoming, strict=True)]
        delay = start - max(time + lag for time, lag in zip(times, lags, strict=True))
        if delay > UNEXPLAINED_NS:
            if rank.filled.share(self.nodes.lane[node], start - delay, start) >= FILLED:
                self.roomless[node] = delay
            elif self.nodes.start_ns[node] >= rank.begins_ns:  # earlier work had launches that no trace has
                self.unexplained[node] = delay
        for (point, _, kind), lag in zip(incoming, lags, strict=True):
            self.arcs.add(point, 2 * node, lag + delay, kind)

    def _time(self, point: int) -> float:
        return self.nodes.end_ns[point // 2] if point % 2 else self.nodes.start_ns[point // 2]

    # ---- host waits ----------------------------------------------------------------------------

    def _add_syncs(self, rank: _Rank) -> None:
        activity, nodes = rank.activity, self.nodes
        calls = activity.calls
        waited = dict(rank.dependencies.of_call)
        waited.update(_blocking_copies(activity))
        queued = _full_queues(activity)
        usual = _usual_cost(activity)
        for i, node in rank.node_of_call.items():
            cost = nodes.end_ns[node] - nodes.start_ns[node]
            sources = [(2 * rank.node_of_work[p] + 1, ArcKind.SYNC) for p in waited.get(i, ())]
            if not sources and i in queued:
                sources = [(2 * rank.node_of_work[queued[i]], ArcKind.QUEUE)]
                self.num_inferred += 1
            if sources:
                latest = max(self._time(point) for point, _ in sources)
                back = nodes.end_ns[node] - latest
                was_blocked = latest > nodes.start_ns[node] and cost > usual.get(calls.name[i], 0.0)
                cost_ns = min(cost, usual.get(calls.name[i], RETURN_NS)) if was_blocked else cost
                for point, kind in sources:
                    lag = (
                        back
                        if was_blocked and self._time(point) == latest
                        else min(RETURN_NS, nodes.end_ns[node] - self._time(point))
                    )
                    self.arcs.add(point, 2 * node + 1, lag, kind)
                self.num_inferred += i in rank.dependencies.inferred_calls
                cost = cost_ns
            self.arcs.add(2 * node, 2 * node + 1, cost, ArcKind.CALL)

    # ---- collectives ---------------------------------------------------------------------------

    def _add_collectives(self, ranks: list[_Rank]) -> None:
        node_of = [
            {int(c): rank.node_of_work[i] for i, c in enumerate(rank.activity.work.collective) if c >= 0}
            for rank in ranks
        ]
        matched: set[tuple[int, int]] = set()
        for group in self.view.groups if self.view is not None else ():
            for row_calls in group.call.tolist():
                members = [
                    (row, call, node_of[row][call])
                    for row, call in zip(group.rows, row_calls, strict=True)
                    if call >= 0 and call in node_of[row]
                ]
                if len(members) > 1:
                    self._add_meeting(ranks, members)
                    matched.update((row, call) for row, call, _ in members)
        for members in self._pairs(node_of):
            self._add_meeting(ranks, members)
            matched.update((row, call) for row, call, _ in members)
        for row, nodes in enumerate(node_of):
            for call, node in nodes.items():
                if (row, call) not in matched:
                    self._add_collective(ranks[row], call, (node,), -1)  # without a meeting
        self.collectives.sort(
            key=lambda collective: min(self.nodes.start_ns[node] for node in collective.members)
        )
        self.collective_of = {
            node: i for i, collective in enumerate(self.collectives) for node in collective.members
        }

    def _pairs(self, node_of: list[dict[int, int]]) -> list[list[tuple[int, int, int]]]:
        """Point to point between the two ranks of a group, matched by order: a communicator of two runs its
        calls in one order. Among more ranks the traces do not say who talks to whom."""
        sides_of_group: dict[tuple[int, ...], dict[int, list[tuple[int, int, int]]]] = {}
        num_left = 0
        for row, nodes in enumerate(node_of):
            rank_calls = self.calls[row]
            for call, node in sorted(nodes.items()):
                if rank_calls.op_of(call) not in POINT_TO_POINT:
                    continue
                ranks = rank_calls.group_of(call).ranks
                if ranks is None and len(node_of) == 2:
                    ranks = tuple(activity.rank for activity in self.activities)
                if ranks is None or len(ranks) != 2:
                    num_left += 1
                    continue
                sides_of_group.setdefault(ranks, {}).setdefault(row, []).append((row, call, node))
        pairs: list[list[tuple[int, int, int]]] = []
        for sides in sides_of_group.values():
            if len({len(rows) for rows in sides.values()}) == 1 and len(sides) == 2:
                pairs += [list(pair) for pair in zip(*sides.values(), strict=True)]
            else:
                num_left += sum(map(len, sides.values()))
        if num_left and len(node_of) > 1:
            self.notes.append(f"{num_left} sends and receives were not matched: their waits are in them")
        return pairs

    def _add_meeting(self, ranks: list[_Rank], members: list[tuple[int, int, int]]) -> None:
        nodes = self.nodes
        row, call, first = members[0]
        # A collective moves nothing before its last rank's kernel runs. So each kernel is split at that
        # moment: up to the meeting it waits, after it it transfers, and only the transfer has a length.
        arrival = max(nodes.start_ns[node] for _, _, node in members)
        rank_calls = self.calls[row]
        meeting = nodes.add(NodeKind.MEETING, -1, rank_calls.op_of(call), "", arrival, arrival)
        self.arcs.add(2 * meeting, 2 * meeting + 1, 0.0, ArcKind.TRANSFER)
        for _, _, node in members:
            self.arcs.add(2 * node, 2 * meeting, 0.0, ArcKind.ARRIVAL)
            if rank_calls.op_of(call) in ONE_WAY and nodes.end_ns[node] < arrival:
                length = nodes.end_ns[node] - nodes.start_ns[node]
                self.arcs.add(2 * node, 2 * node + 1, length, ArcKind.DURATION)
                continue
            self.arcs.add(2 * node, 2 * node + 1, 0.0, ArcKind.DURATION)
            transfer = max(0.0, nodes.end_ns[node] - arrival)
            self.arcs.add(2 * meeting + 1, 2 * node + 1, transfer, ArcKind.TRANSFER)
        self._add_collective(ranks[row], call, tuple(node for _, _, node in members), meeting)

    def _add_collective(self, rank: _Rank, call: int, members: tuple[int, ...], meeting: int) -> None:
        rank_calls = self.calls[rank.row]
        group = rank_calls.group_of(call)
        op = rank_calls.op_of(call)
        node = members[0]
        self.collectives.append(
            TracedCollective(
                op=op,
                unit=self._unit(rank, node),
                members=members,
                meeting=meeting,
                size_bytes=rank_calls.bytes_of(call),
                num_ranks=len(group.ranks) if group.ranks is not None else None,
                group=group.name,
                step=self.nodes.step[node],
            )
        )

    def _unit(self, rank: _Rank, node: int) -> str:
        place = node - rank.node_of_work[0]
        call = int(rank.activity.work.call[place])
        if call < 0:
            return ""
        calls = rank.activity.calls
        for name in rank.activity.scopes.annotations(calls.thread[call], int(calls.start_ns[call])):
            unit = UNIT.search(name)
            if unit is not None:
                return unit[1]
        return ""

    # ---- steps ---------------------------------------------------------------------------------

    def _add_steps(self, ranks: list[_Rank]) -> list[tuple[int | None, tuple[StepEnd, ...]]]:
        if not self.step_place:
            return [self._whole_step(ranks)]
        ends: dict[int, list[StepEnd]] = defaultdict(list)
        for rank in ranks:
            points = [(number, 2 * self._reached(rank, node)) for number, node in rank.host_steps]
            for (number, point), (_, following) in zip(points, points[1:], strict=False):
                if number in self.step_place:
                    ends[number].append(StepEnd(rank.activity.rank, point, following))
        return [(number, tuple(ends[number])) for number in self.step_place]

    def _reached(self, rank: _Rank, host_step: int) -> int:
        """The STEP node for the beginning of a step on the host."""
        nodes, activity = self.nodes, rank.activity
        time = nodes.start_ns[host_step]
        work, last, launched = activity.work, None, -math.inf
        for i, node in enumerate(rank.node_of_work):
            if work.stream[i] != activity.compute_stream:
                continue
            call = int(work.call[i])
            # A stream runs in order of launch: work without one was launched after what ran before it.
            if call >= 0:
                launched = max(launched, nodes.start_ns[rank.node_of_call[call]])
            elif not activity.has_host:
                launched = nodes.start_ns[node]
            if launched < time:
                last = node
        reached = max(time, nodes.end_ns[last]) if last is not None else time
        node = nodes.add(NodeKind.STEP, activity.rank, "step", "", reached, reached)
        self.arcs.add(2 * host_step, 2 * node, 0.0, ArcKind.STEP)
        if last is not None:
            self.arcs.add(2 * last + 1, 2 * node, 0.0, ArcKind.STEP)
        self.arcs.add(2 * node, 2 * node + 1, 0.0, ArcKind.STEP)
        return node

    def _whole_step(self, ranks: list[_Rank]) -> tuple[int | None, tuple[StepEnd, ...]]:
        """The whole trace as one step, from the first device work of each rank to its last."""
        self.notes.append("no step is marked on all ranks: the whole trace is one step")
        ends = []
        for rank in ranks:
            nodes, step_nodes = self.nodes, []
            last_of_stream: dict[str, int] = {}
            for i, node in enumerate(rank.node_of_work):
                last_of_stream[rank.activity.work.stream[i]] = node
            begin = min(rank.node_of_work, key=lambda node: self.nodes.start_ns[node])
            last_nodes = last_of_stream.values()
            for time, sources in (
                (nodes.start_ns[begin], [2 * begin]),
                (
                    max(nodes.end_ns[n] for n in last_nodes),
                    [2 * n + 1 for n in last_nodes],
                ),
            ):
                node = nodes.add(NodeKind.STEP, rank.activity.rank, "step", "", time, time)
                for point in sources:
                    self.arcs.add(point, 2 * node, 0.0, ArcKind.STEP)
                self.arcs.add(2 * node, 2 * node + 1, 0.0, ArcKind.STEP)
                step_nodes.append(node)
            ends.append(StepEnd(rank.activity.rank, 2 * step_nodes[0], 2 * step_nodes[1]))
        return None, tuple(ends)


def _notes_of_ranks(activities: Sequence[RankActivity]) -> list[str]:
    """Each note once, with its ranks if it does not hold for all."""
    ranks_of_note: dict[str, list[int]] = defaultdict(list)
    for activity in activities:
        for note in activity.notes:
            ranks_of_note[note].append(activity.rank)
    return [
        note if len(ranks) == len(activities) else f"rank {', '.join(map(str, ranks))}: {note}"
        for note, ranks in ranks_of_note.items()
    ]


def _program(operator: str | None, annotation: str | None) -> str:
    operator = WRITTEN_AS.get(operator or "", operator)
    if operator and annotation:
        return f"{operator} in {annotation}"
    return operator or annotation or "between operators"


def _lines(activity: RankActivity, node_of_call: dict[int, int]) -> list[list[int]]:
    """Calls of threads that take turns, together; the line with the most calls first."""
    calls = activity.calls
    threads: dict[str, list[int]] = defaultdict(list)
    for i in sorted(node_of_call):
        threads[calls.thread[i]].append(i)
    lines: list[list[int]] = []
    for rows in sorted(threads.values(), key=len, reverse=True):
        for line in lines:
            if _take_turns(line, rows):
                line.extend(rows)
                line.sort()
                break
        else:
            lines.append(list(rows))
    return lines


def _take_turns(line: list[int], rows: list[int]) -> bool:
    """True if each thread runs for long while the other rests."""
    pieces = {bisect_left(line, i) for i in rows}
    return len(pieces) <= max(8, MOST_SWITCHES * len(rows))


def _typical(activity: RankActivity, dependencies: Dependencies) -> tuple[float, float, float]:
    """Usual ns from a launch call's start to its work on an idle stream, between work of a stream, and from
    the end of work to what waited for it on another stream: the 10th percentile of each, as measured where
    nothing else was waited for."""
    work, calls = activity.work, activity.calls
    launch: list[float] = []
    stream: list[float] = []
    event: list[float] = []
    last_end: dict[str, int] = {}
    start_ns, end_ns, called_ns = work.start_ns.tolist(), work.end_ns.tolist(), calls.start_ns.tolist()
    for i, (start, call) in enumerate(zip(start_ns, work.call.tolist(), strict=True)):
        previous_end = last_end.get(work.stream[i])
        launched = called_ns[call] if call >= 0 else None
        producers = dependencies.of_work.get(i, ())
        awaited = max((end_ns[p] for p in producers), default=None)
        times = [t for t in (launched, previous_end, awaited) if t is not None]
        if times:
            latest = max(times)
            if start >= latest:
                (launch if latest == launched else stream if latest == previous_end else event).append(
                    start - latest
                )
        last_end[work.stream[i]] = end_ns[i]
    return _low(launch, 4_000.0), _low(stream, 1_000.0), _low(event, 2_000.0)


def _low(values: list[float], otherwise: float) -> float:
    return float(np.percentile(values, 10)) if len(values) >= 5 else otherwise


def _usual_cost(activity: RankActivity) -> dict[str, float]:
    """Usual ns of a call by name: the 10th percentile of its durations."""
    calls = activity.calls
    lengths: dict[str, list[float]] = defaultdict(list)
    for name, start, end in zip(calls.name, calls.start_ns.tolist(), calls.end_ns.tolist(), strict=True):
        lengths[name].append(end - start)
    return {name: min(float(np.percentile(durations, 10)), BLOCKED_NS) for name, durations in lengths.items()}


def _blocking_copies(activity: RankActivity) -> dict[int, set[int]]:
    """Launches of copies that returned only after the copy was done: the host waited for it."""
    work, calls = activity.work, activity.calls
    copies: dict[int, set[int]] = {}
    for i in np.flatnonzero(work.kind == WorkKind.COPY).tolist():
        call = int(work.call[i])
        if call < 0 or "emcpy" not in calls.name[call] or not may_be_awaited(work.name[i]):
            continue
        duration_ns = int(calls.end_ns[call] - calls.start_ns[call])
        if (
            duration_ns >= BLOCKED_NS
            and 0 <= int(calls.end_ns[call] - work.end_ns[i]) + EARLY_NS <= BLOCKED_NS
        ):
            copies[call] = {i}
    return copies


def _full_queues(activity: RankActivity) -> dict[int, int]:
    """Launches that waited for room: the work whose start let each of them go on."""
    work, calls = activity.work, activity.calls
    linked = np.flatnonzero(work.call >= 0)
    if len(linked) == 0:
        return {}
    duration_ns = calls.end_ns - calls.start_ns
    is_launch = calls.kind == CallKind.LAUNCH
    limit = max(QUEUE_FULL_NS, 20 * float(np.median(duration_ns[is_launch])))
    long = np.flatnonzero(is_launch & (duration_ns >= limit))
    launched = np.sort(calls.start_ns[work.call[linked]])
    order = linked[np.argsort(work.start_ns[linked], kind="stable")]
    started = work.start_ns[order]
    work_of_launch: dict[int, int] = {}
    for i in long.tolist():
        num_launched = int(np.searchsorted(launched, calls.start_ns[i], side="left"))
        num_started = int(np.searchsorted(started, calls.start_ns[i], side="right"))
        if num_launched - num_started < QUEUE_PENDING:
            continue
        last_started = int(np.searchsorted(started, calls.end_ns[i], side="right")) - 1
        if (
            last_started >= 0
            and work.call[order[last_started]] != i
            and started[last_started] > calls.start_ns[i]
        ):
            work_of_launch[i] = int(order[last_started])
    return work_of_launch
