"""A device whose queues are known: what the probe must find out about it.

Slow and plain: one event after the other. Streams submit into first-in-first-out queues; which one, the
stream says (`queue_of`), or it is dealt at random. The head of a queue is a
kernel, which goes when its stream's predecessor is done, or a wait, which goes when its event is. With order
"start" the next command becomes head as soon as the head has gone; with "barrier" only when everything before
it in the queue has ended. Kernels that have gone are placed on the device by priority, then by arrival.
"""

import heapq
import random
from bisect import bisect_left
from collections.abc import Callable, Sequence

import numpy as np

from aorta.queues.probe.machine import Op, Outcome, ProbeClock, QueueRecord, QueueWait, Spin, Stamp
from aorta.queues.probe.staircase import Order

WARPS_PER_CTA = 8


class SimulatedDevice:
    def __init__(
        self,
        num_streams: int,
        queues: int,
        order: Order = "start",
        *,
        queue_of: Callable[[int], int] | None = None,
        is_random: bool = False,
        record_blocks: bool = True,
        priorities: Sequence[int] = (),
        resident_ctas: int = 1056,
        gap_us: float = 1.0,
        event_us: float = 0.0,
        noise_us: float = 0.0,
        dispatch_us: float = 0.0,
        tick_ns: float = 1.0,
        seed: int = 0,
        primed: bool = True,
    ) -> None:
        self.num_streams = num_streams
        self.resident_ctas = resident_ctas
        self.order = order
        self.num_queues, self.is_random = queues, is_random
        self.record_blocks = record_blocks
        self.queue_of = queue_of or (lambda stream: stream % queues)
        self.priorities = priorities or [0] * num_streams
        self.gap_us, self.event_us, self.noise_us = gap_us, event_us, noise_us
        self.dispatch_us = dispatch_us
        self.random = random.Random(seed)
        self.primed = primed
        self.clock = ProbeClock(source="simulated", tick_ns=tick_ns, read_ns=20, ns_per_count=1, host_ratio=1)

    def run(self, program: Sequence[Op]) -> Outcome:
        start, end = _Run(self, program).times()
        tick_us = self.clock.tick_ns / 1e3
        return Outcome(
            start_us=np.floor(np.array(start) / tick_us) * tick_us,
            end_us=np.floor(np.array(end) / tick_us) * tick_us,
            primed=self.primed,
        )


class _Run:
    """One program from the opening of the gate to its end."""

    def __init__(self, device: SimulatedDevice, program: Sequence[Op]) -> None:
        self.device, self.program = device, program
        self.now = 0.0
        self.done: dict[int, float] = {}
        self.start: dict[int, float] = {}
        self.ready_at: dict[int, float] = {}
        self.alarms: list[float] = [0.0]
        self.ending: list[tuple[float, int, int]] = []  # time, op, warps that become free
        self.waiting: list[tuple[int, int, int]] = []  # priority, arrival, op
        self.ctas_left: dict[int, int] = {}
        self.ctas_running: dict[int, int] = {}
        self.free_warps = device.resident_ctas * WARPS_PER_CTA
        self.arrivals = 0
        self.next_dispatch = 0.0
        self.open_records: list[int] = []
        self.before, self.event_of = self._dependencies()
        self.queues: dict[int, list[int]] = {}
        for index, queue in enumerate(self._queues()):
            self.queues.setdefault(queue, []).append(index)
        self.gone: dict[int, list[int]] = {queue: [] for queue in self.queues}

    def _queues(self) -> list[int]:
        """By operation. Events and waits go where their stream's next kernel goes, or else its last one."""
        device = self.device
        dealt: dict[int, int] = {}
        if device.is_random:
            dealt = self._deal()
        by_stream: dict[int, list[int]] = {}
        for index in dealt:
            by_stream.setdefault(self.program[index].stream, []).append(index)
        queues = []
        for index, op in enumerate(self.program):
            if not device.is_random:
                queues.append(device.queue_of(op.stream))
            else:
                mine = by_stream.get(op.stream)
                nowhere = device.num_queues + op.stream  # a stream without kernels is in nobody's way
                queues.append(dealt[mine[min(bisect_left(mine, index), len(mine) - 1)]] if mine else nowhere)
        return queues

    def _deal(self) -> dict[int, int]:
        """Queue by kernel; a stream keeps the one that it got at random."""
        held: dict[int, int] = {}
        dealt: dict[int, int] = {}
        for index, op in enumerate(self.program):
            if isinstance(op, Spin | Stamp):
                if op.stream not in held:
                    held[op.stream] = self.device.random.randrange(self.device.num_queues)
                dealt[index] = held[op.stream]
        return dealt

    def _dependencies(self) -> tuple[list[int | None], dict[int, int]]:
        """By operation: the one before it on its stream; by wait: the record that it waits for."""
        last: dict[int, int] = {}
        recorded: dict[int, int] = {}
        before: list[int | None] = []
        event_of: dict[int, int] = {}
        for index, op in enumerate(self.program):
            before.append(last.get(op.stream))
            last[op.stream] = index
            if isinstance(op, QueueRecord):
                recorded[op.event] = index
            elif isinstance(op, QueueWait):
                event_of[index] = recorded[op.event]
        return before, event_of

    def times(self) -> tuple[list[float], list[float]]:
        while len(self.done) < len(self.program):
            self.now = min([*self.alarms[:1], *[entry[0] for entry in self.ending[:1]]])
            while self.alarms and self.alarms[0] <= self.now:
                heapq.heappop(self.alarms)
            self._end_ctas()
            while self._end_records() or self._advance_queues():
                pass
            self._place()
        kernels = [index for index, op in enumerate(self.program) if isinstance(op, Spin | Stamp)]
        return [self.start[index] for index in kernels], [self.done[index] for index in kernels]

    def _end_ctas(self) -> None:
        while self.ending and self.ending[0][0] <= self.now:
            _, index, warps = heapq.heappop(self.ending)
            self.free_warps += warps
            self.ctas_running[index] -= 1
            if not self.ctas_running[index] and not self.ctas_left[index]:
                self.done[index] = self.now

    def _end_records(self) -> bool:
        """Records that left their queue end when what they capture has ended."""
        ended = [index for index in self.open_records if self._captured(index)]
        for index in ended:
            self.open_records.remove(index)
            self.done[index] = self.now
        return bool(ended)

    def _captured(self, index: int) -> bool:
        return self.before[index] is None or self.before[index] in self.done

    def _advance_queues(self) -> bool:
        moved = False
        for name, queue in self.queues.items():
            while queue and self._may_go(name, queue[0]):
                index = queue.pop(0)
                self.gone[name].append(index)
                moved = True
                if isinstance(self.program[index], Spin | Stamp):
                    self._arrive(index)
                elif isinstance(self.program[index], QueueRecord):
                    self.open_records.append(index)
                else:
                    self.done[index] = self.now
        return moved

    def _may_go(self, queue: str | int, index: int) -> bool:
        gone = self.gone[queue]  # type: ignore[index]
        if self.device.order == "barrier" and not all(other in self.done for other in gone):
            return False
        needed = [other for other in (self.before[index], self.event_of.get(index)) if other is not None]
        if isinstance(self.program[index], QueueRecord):
            return not self.device.record_blocks or all(other in self.done for other in needed)
        if not all(other in self.done for other in needed):
            return False
        if index not in self.ready_at:
            self.ready_at[index] = self.now + self._latency(index)
            heapq.heappush(self.alarms, self.ready_at[index])
        return self.ready_at[index] <= self.now

    def _latency(self, index: int) -> float:
        device = self.device
        latency = device.gap_us
        if isinstance(self.program[index], QueueWait):
            latency = device.event_us
        return latency + (abs(device.random.gauss(0, device.noise_us)) if device.noise_us else 0.0)

    def _arrive(self, index: int) -> None:
        op = self.program[index]
        self.ctas_left[index] = op.ctas if isinstance(op, Spin) else 1
        self.ctas_running[index] = 0
        self.arrivals += 1
        heapq.heappush(self.waiting, (self.device.priorities[op.stream], self.arrivals, index))

    def _place(self) -> None:
        """CTAs in order of priority, then arrival; nobody overtakes a kernel that does not fit.

        One kernel begins at a time, dispatch_us after the one before.
        """
        while self.waiting:
            index = self.waiting[0][2]
            op = self.program[index]
            us, total = (op.us, op.ctas) if isinstance(op, Spin) else (0.0, 1)
            warps = 1 if total == 1 else WARPS_PER_CTA
            num = min(self.ctas_left[index], self.free_warps // warps)
            if num == 0:
                return
            if index not in self.start:
                if self.now < self.next_dispatch:
                    heapq.heappush(self.alarms, self.next_dispatch)
                    return
                self.next_dispatch = self.now + self.device.dispatch_us
            self.start.setdefault(index, self.now)
            self.free_warps -= num * warps
            self.ctas_left[index] -= num
            self.ctas_running[index] += 1
            heapq.heappush(self.ending, (self.now + us, index, num * warps))
            if not self.ctas_left[index]:
                heapq.heappop(self.waiting)
