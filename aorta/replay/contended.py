"""Times of a graph whose kernels run slower while a collective runs on their device.

A kernel's work is what it takes alone. Beside a collective, a waiting one included, it does (1 - rate) of it
per unit of time. Collectives begin when kernels end, so lengths and times are told together, in time's order.
"""

from collections import defaultdict
from collections.abc import Callable
from heapq import heappop, heappush

import numpy as np

from aorta.replay.contention import Contention
from aorta.replay.draft import NEVER
from aorta.replay.graph import Arcs, TraceGraph

END, BEGIN, DONE, START = range(4)
"""What happens at a time, in this order where times are equal."""


def contended_times(
    graph: TraceGraph, arcs: Arcs, lengths: list[float], of_graph: Contention | None
) -> list[float] | None:
    """By point the time; lengths, by arc with kernels alone, become what they are beside collectives. Without
    a Contention they stay. None where arcs form a circle."""
    run = _Run(graph, arcs, lengths, of_graph)
    return run.times if run.is_whole() else None


def _switches(graph: TraceGraph) -> list[int]:
    """By point: 0; 1 + rank where one of its collectives begins, the negative where it ends."""
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
        self, graph: TraceGraph, arcs: Arcs, lengths: list[float], of_graph: Contention | None
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
        if of_graph is not None:
            self.kernel_arcs = of_graph.arcs.tolist()
            self.speed = (1.0 - of_graph.rates).tolist()
            self.rank = of_graph.rank.tolist()
            self.end_point = (2 * of_graph.nodes + 1).tolist()
            is_slowed = (of_graph.rates > 0) & (length[of_graph.arcs] > 0)
            work[of_graph.arcs[is_slowed]] = np.flatnonzero(is_slowed)
            if is_slowed.any():
                self.switch = _switches(graph)
        self.work = work[order].tolist()
        self.left = np.bincount(target[live], minlength=num_points).tolist()
        self.latest = [NEVER] * num_points
        self.times = [0.0] * num_points
        self.events: list[tuple[float, int, int, int]] = []
        self.num_beside: dict[int, int] = defaultdict(int)
        self.running: dict[int, set[int]] = defaultdict(set)
        num_kernels = 0 if of_graph is None else len(of_graph.nodes)
        self.rest = [0.0] * num_kernels
        """Of each running kernel: work that is left,"""
        self.since = [0.0] * num_kernels
        """as of this time,"""
        self.version = [0] * num_kernels
        """and how often its end was told anew."""
        self.began = [0.0] * num_kernels
        self._follow = self._follower()
        self._follow([point for point, num in enumerate(self.left) if num == 0])
        self._go_on()

    def is_whole(self) -> bool:
        return not any(self.left)

    def _follower(self) -> Callable[[list[int]], None]:
        """What gives times to all that comes after points, up to kernels, whose ends take time to tell. A
        closure, because a replay calls it once for every kernel."""
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
                    come = time + length[k]
                    if come > latest[following]:
                        latest[following] = come
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
                if version == self.version[which]:
                    self._end(which, time)
            else:
                num = self.num_beside[which] = self.num_beside[which] + (1 if kind == BEGIN else -1)
                if num == (1 if kind == BEGIN else 0):
                    self._change_speed(which, time)

    def _start(self, kernel: int, time: float) -> None:
        rank, length = self.rank[kernel], self.lengths[self.kernel_arcs[kernel]]
        end = time + (length / self.speed[kernel] if self.num_beside[rank] else length)
        if not self.events or end <= self.events[0][0]:  # nothing happens meanwhile
            self.lengths[self.kernel_arcs[kernel]] = end - time
            self._arrive(kernel, end)
            return
        self.running[rank].add(kernel)
        self.began[kernel] = self.since[kernel] = time
        self.rest[kernel] = length
        heappush(self.events, (end, DONE, kernel, self.version[kernel]))

    def _tell_end(self, kernel: int) -> None:
        speed = self.speed[kernel] if self.num_beside[self.rank[kernel]] > 0 else 1.0
        end = self.since[kernel] + self.rest[kernel] / speed
        heappush(self.events, (end, DONE, kernel, self.version[kernel]))

    def _change_speed(self, rank: int, time: float) -> None:
        """From the other speed to what is right from now on."""
        for kernel in self.running[rank]:
            before = 1.0 if self.num_beside[rank] > 0 else self.speed[kernel]
            past = max(0.0, time - self.since[kernel])
            self.rest[kernel] = max(0.0, self.rest[kernel] - past * before)
            self.since[kernel] += past
            self.version[kernel] += 1
            self._tell_end(kernel)

    def _end(self, kernel: int, time: float) -> None:
        self.running[self.rank[kernel]].discard(kernel)
        self.lengths[self.kernel_arcs[kernel]] = time - self.began[kernel]
        self._arrive(kernel, time)

    def _arrive(self, kernel: int, time: float) -> None:
        """What waits for the end of a kernel."""
        point = self.end_point[kernel]
        self.latest[point] = max(self.latest[point], time)
        self.left[point] -= 1
        if self.left[point] == 0:
            self.times[point] = self.latest[point]
            self._follow = self._follower()
        self._follow([point])
