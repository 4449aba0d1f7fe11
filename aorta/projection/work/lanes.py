"""Work of one rank on streams: what starts when, what is hidden, and what each stall waits for.

Each stream runs its tasks in order. The host issues all tasks one after the other in the order of the list,
and none starts before it was issued. While communication runs beside compute, both are slower by stated
factors: they share memory bandwidth and compute units. A collective that waits for the network between nodes
is only as much slower as its work on the GPUs takes longer than the network.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

COMPUTE = "compute"


class StreamTask(NamedTuple):
    stream: str
    name: str
    category: str
    """Category that the breakdown counts it under."""
    seconds: float
    """Alone on the device."""
    dependencies: tuple[int, ...] = ()
    """Tasks that must have ended, by their number; earlier tasks of the stream always must."""
    parts: tuple[tuple[str, str, float], ...] = ()
    """(name, category, seconds) of what was joined into this task."""
    op: str = ""
    """Operation of a collective, as in torch.distributed."""
    issue_s: float = 0.0
    """Host time to issue it."""
    size_bytes: float = 0.0
    """Size of a collective: the full buffer."""
    link_share: float = 1.0
    """Share of a collective's time that its work on the GPUs takes. Below 1 it waits for the
    network between nodes, which compute beside it does not slow down."""


HOST = "host"


class Contention(NamedTuple):
    """Factors on a task's time while the other kind runs beside it."""

    compute: float = 1.0
    communication: float = 1.0


class StreamRun(NamedTuple):
    start_s: list[float]
    end_s: list[float]
    compute_s: dict[str, float]
    """Compute stream by category, as if it were alone."""
    slowed_s: float
    """Slow-down by communication beside it."""
    stalled_s: dict[str, float]
    """Compute stream waiting, by the category of what it waits for."""

    @property
    def total_s(self) -> float:
        return max(self.end_s, default=0.0)


ALONE = Contention()


def run(tasks: Sequence[StreamTask], contention: Contention = ALONE) -> StreamRun:
    """Times of every task. The compute stream's work, slow-down and stalls add up to the total."""
    queues: dict[str, list[int]] = defaultdict(list)
    for number, task in enumerate(tasks):
        queues[task.stream].append(number)
    streams = [Stream(name == COMPUTE, queue) for name, queue in queues.items()]
    left = [task.seconds for task in tasks]
    needed = [task.dependencies for task in tasks]
    slow = [max(1.0, contention.communication * task.link_share) for task in tasks]
    start, end = [-1.0] * len(tasks), [-1.0] * len(tasks)
    issued = list(accumulate(task.issue_s for task in tasks))
    clock_s = 0.0
    remaining = len(tasks)
    while remaining:
        next_issue = math.inf
        computing = communicating = False
        for stream in streams:
            number = stream.active
            if number < 0:
                number = stream.ready(needed, end)
                if number < 0:
                    continue
                if issued[number] > clock_s:
                    next_issue = min(next_issue, issued[number])
                    continue
                stream.active = number
                start[number] = clock_s
            if not stream.is_compute:
                communicating = True
            elif left[number] > 0:
                computing = True
        step = math.inf
        for stream in streams:
            number = stream.active
            if number < 0:
                continue
            if stream.is_compute:
                stream.slowed = contention.compute if communicating else 1.0
            else:
                stream.slowed = slow[number] if computing else 1.0
            remaining_s = left[number] * stream.slowed
            if remaining_s < step:
                step = remaining_s
        if step == math.inf:
            assert next_issue < math.inf, "tasks wait for each other in a circle"
            clock_s = next_issue
            continue
        arrives = next_issue - clock_s <= step
        step = min(step, next_issue - clock_s)
        clock_s = next_issue if arrives else clock_s + step
        for stream in streams:
            number = stream.active
            if number < 0:
                continue
            left[number] -= step / stream.slowed
            if left[number] <= 1e-15:
                left[number] = 0.0
                end[number] = clock_s
                stream.head += 1
                stream.active = -1
                remaining -= 1
    return _account(tasks, queues.get(COMPUTE, []), start, end)


class Stream:
    """The queue of one stream while its tasks run."""

    __slots__ = ("active", "head", "is_compute", "queue", "slowed")

    def __init__(self, is_compute: bool, queue: list[int]) -> None:
        self.is_compute, self.queue = is_compute, queue
        self.head = 0
        self.active = -1
        """The task that runs; -1: none."""
        self.slowed = 1.0

    def ready(self, needed: Sequence[tuple[int, ...]], end: list[float]) -> int:
        """The next task where all that it waits for has ended, else -1."""
        if self.head == len(self.queue):
            return -1
        number = self.queue[self.head]
        for dependency in needed[number]:
            if end[dependency] < 0:
                return -1
        return number


def _account(
    tasks: Sequence[StreamTask], compute: Sequence[int], start: list[float], end: list[float]
) -> StreamRun:
    work: dict[str, float] = defaultdict(float)
    stalled: dict[str, float] = defaultdict(float)
    slowed = 0.0
    last = 0.0
    for number in compute:
        task = tasks[number]
        if start[number] > last:
            for cause, seconds in waits(tasks, number, last, start, end):
                stalled[cause] += seconds
        lone_part = ((task.name, task.category, task.seconds),) if task.seconds else ()
        for _, category, seconds in task.parts or lone_part:
            work[category] += seconds
        slowed += end[number] - start[number] - task.seconds
        last = end[number]
    finish = max(end, default=0.0)
    if finish > last:
        final = max(range(len(tasks)), key=lambda index: end[index])
        stalled[tasks[final].category] += finish - last
    return StreamRun(start, end, dict(work), slowed, dict(stalled))


def waits(
    tasks: Sequence[StreamTask], number: int, since: float, start: Sequence[float], end: Sequence[float]
) -> Iterator[tuple[str, float]]:
    """Causes and seconds of a compute task's wait since the task before it: other streams, then the host."""
    ready = since
    if tasks[number].dependencies:
        cause = max(tasks[number].dependencies, key=lambda index: end[index])
        if end[cause] > since:
            ready = end[cause]
            yield tasks[cause].category, ready - since
    if start[number] > ready:
        yield HOST, start[number] - ready


def merged(*parts: Mapping[str, float]) -> dict[str, float]:
    """Sums per category."""
    total: dict[str, float] = defaultdict(float)
    for part in parts:
        for category, seconds in part.items():
            total[category] += seconds
    return dict(total)


def at_least(simulated: StreamRun, host_s: float) -> StreamRun:
    """The run, and what it waits for a host that takes longer and cannot run ahead."""
    waits_s = host_s - simulated.total_s
    if waits_s <= 0:
        return simulated
    return StreamRun(
        [0.0], [host_s], simulated.compute_s, simulated.slowed_s, merged(simulated.stalled_s, {HOST: waits_s})
    )


def summed(parts: list[tuple[StreamRun, int]]) -> StreamRun:
    """Runs one after the other, each some number of times."""
    return StreamRun(
        [0.0],
        [sum(part.total_s * count for part, count in parts)],
        merged(*(scaled(part.compute_s, count) for part, count in parts)),
        sum(part.slowed_s * count for part, count in parts),
        merged(*(scaled(part.stalled_s, count) for part, count in parts)),
    )


def scaled(seconds: dict[str, float], times: float) -> dict[str, float]:
    """Seconds by category, each that many times."""
    return {category: value * times for category, value in seconds.items()}


def waiting(seconds: float, cause: str) -> StreamRun:
    """Nothing but a wait."""
    return StreamRun([0.0], [seconds], {}, 0.0, {cause: seconds})
