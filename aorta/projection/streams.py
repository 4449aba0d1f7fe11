"""Tasks of one rank on streams: how operations become tasks, what starts when, and what is hidden.

`Lanes` collects tasks in the order in which the host issues them. `run` plays them: each stream runs its
tasks in order, and none starts before the host has issued it. While communication runs beside compute, both
are slower by stated factors, because they share memory bandwidth and compute units. A collective that waits
for the network between nodes is slowed only by the share that its work on the GPUs takes.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from aorta.projection.ops import AttentionOp, CollectiveOp, GemmOp
from aorta.projection.plan import Plan
from aorta.projection.prices import Contention, Priced

COMPUTE = "compute"
HOST = "host"
STREAMS = {
    "tp": "tp",
    "ep": "all_to_all",
    "cp": "context",
    **dict.fromkeys(("dp", "edp", "copies"), "data_parallel"),
}
MOST_PARTS = 6
"""Operations of one compute task: the host is seen to issue them in groups of at most that many."""
BEFORE = -1
"""Number that stands for the last compute task before a Block."""
ALONE = Contention()


class StreamTask(NamedTuple):
    """Work of one stream that starts when what it waits for has ended."""

    stream: str
    name: str
    category: str
    """Category that the breakdown counts it under."""
    seconds: float
    """Time alone on the device."""
    dependencies: tuple[int, ...] = ()
    """Tasks that must have ended, by their number; earlier tasks of the stream always must."""
    parts: tuple[tuple[str, str, float], ...] = ()
    """(name, category, seconds) of what was joined into this task."""
    issue_s: float = 0.0
    """Host time to issue it."""
    link_share: float = 1.0
    """Share of a collective's time that its work on the GPUs takes. Below 1 it waits for the
    network between nodes, which compute beside it does not slow down."""


class Block(NamedTuple):
    """The tasks of one pass through a unit, their numbers counted from the block's first."""

    tasks: tuple[StreamTask, ...]
    last: int
    """The last compute task, or BEFORE."""
    parts: tuple[tuple[str, str, float], ...]
    """Kernels collected at the block's end that are not a task yet: name, category, seconds."""
    needs: tuple[int, ...]
    issue_s: float


class Lanes:
    """Collects tasks in the order in which the host issues them."""

    def __init__(self) -> None:
        self.tasks: list[StreamTask] = []
        self._blocks: dict[tuple[int, float], tuple[Sequence[Priced], Block]] = {}
        self._parts: list[tuple[str, str, float]] = []
        self._needs: set[int] = set()
        self._last: int | None = None
        self._issue_s = 0.0

    def issue(self, seconds: float) -> None:
        """Host time that passes before the next task can start."""
        self._issue_s += seconds

    def compute(self, name: str, category: str, seconds: float) -> None:
        if seconds > 0:
            self._parts.append((name, category, seconds))

    def flush(self, name: str = "") -> tuple[int, ...]:
        """Close the compute task that is being collected; the last compute task, if there is one."""
        if self._parts or self._needs:
            seconds = sum(part[2] for part in self._parts)
            label = name or (self._parts[0][0] if self._parts else "wait")
            task = StreamTask(
                COMPUTE, label, "compute", seconds, tuple(sorted(self._needs)), tuple(self._parts)
            )
            # A task is what the host issues in one go: its first kernel starts when that one is issued.
            self._append(task)
            self._last = len(self.tasks) - 1
            self._parts, self._needs = [], set()
        return () if self._last is None else (self._last,)

    def communicate(self, priced: Priced, dependencies: tuple[int, ...], share: float = 1.0) -> int:
        """A collective, or that part of it, on the stream of its axis."""
        op, seconds, category, _, link_share = priced
        assert isinstance(op, CollectiveOp)
        self._append(
            StreamTask(
                STREAMS[op.axis], op.name, category, seconds * share, dependencies, link_share=link_share
            )
        )
        return len(self.tasks) - 1

    def _append(self, task: StreamTask) -> None:
        self.tasks.append(task._replace(issue_s=self._issue_s) if self._issue_s else task)
        self._issue_s = 0.0

    def need(self, task: int) -> None:
        """The compute that follows waits for a task."""
        self._needs.add(task)

    def add(self, ops: Sequence[Priced], plan: Plan, launch_s: float = 0.0) -> None:
        """Operations in order, collectives where they ask to be. launch_s: host time of each launch.

        Equal units, with nothing left open before them, are worked out once.
        """
        if self._parts or self._needs:
            self._add(ops, plan, launch_s)
            return
        key = id(ops), launch_s  # the operations are kept beside, so that no others get their id
        if key not in self._blocks:
            lanes = Lanes()
            lanes._last = BEFORE
            lanes._add(ops, plan, launch_s)
            last = BEFORE if lanes._last is None else lanes._last
            block = Block(tuple(lanes.tasks), last, tuple(lanes._parts), tuple(lanes._needs), lanes._issue_s)
            self._blocks[key] = ops, block
        self._place(self._blocks[key][1])

    def _place(self, block: Block) -> None:
        """The block's tasks behind those that are there."""
        base = len(self.tasks)
        before = () if self._last is None else (self._last,)
        for task in block.tasks:
            dependencies: tuple[int, ...] = ()
            for number in task.dependencies:
                dependencies += (base + number,) if number >= 0 else before
            self.tasks.append(StreamTask._make((*task[:4], dependencies, *task[5:])))
        if block.tasks:
            first = self.tasks[base]
            self.tasks[base] = first._replace(issue_s=first.issue_s + self._issue_s)
            self._issue_s = block.issue_s
        else:
            self._issue_s += block.issue_s
        if block.last >= 0:
            self._last = base + block.last
        self._parts = list(block.parts)
        self._needs = {base + number for number in block.needs}

    def _add(self, ops: Sequence[Priced], plan: Plan, launch_s: float) -> None:
        deferred: list[int] = []
        for priced in ops:
            op, seconds, category, *_ = priced
            if len(self._parts) >= MOST_PARTS and launch_s > 0:
                self.flush()
            self.issue(launch_s * op.launches)
            if isinstance(op, CollectiveOp):
                if seconds > 0:
                    self._collective(op, priced, plan, deferred)
                continue
            if deferred and isinstance(op, (GemmOp, AttentionOp)):
                self.flush()
                self.compute(op.name, category, seconds)
                self.flush()
                for task in deferred:
                    self.need(task)
                deferred = []
                continue
            self.compute(op.name, category, seconds)
        for task in deferred:
            self.need(task)

    def _collective(self, op: CollectiveOp, priced: Priced, plan: Plan, deferred: list[int]) -> None:
        chunk = 1 / plan.tp
        if op.overlap == "next":
            deferred.append(self.communicate(priced, self.flush()))
        elif op.overlap == "chunks_next":
            dependencies = self.flush()
            self.need(self.communicate(priced, dependencies, chunk))
            deferred.append(self.communicate(priced, dependencies, 1 - chunk))
        elif op.overlap == "chunks_previous" and self._parts:
            name, kind, gemm_s = self._parts.pop()
            self.compute(name, kind, gemm_s * chunk)
            self.communicate(priced, self.flush(), 1 - chunk)
            self.compute(name, kind, gemm_s * (1 - chunk))
            self.need(self.communicate(priced, self.flush(), chunk))
        else:
            self.need(self.communicate(priced, self.flush()))


class StreamRun(NamedTuple):
    """Times of every task, and what the compute stream's total is made of."""

    start_s: list[float]
    end_s: list[float]
    compute_s: dict[str, float]
    """Work of the compute stream by category, as if it were alone."""
    slowed_s: float
    """Time that communication beside it adds to that work."""
    stalled_s: dict[str, float]
    """Waits of the compute stream, by the category of what it waits for."""

    @property
    def total_s(self) -> float:
        return max(self.end_s, default=0.0)


def run(tasks: Sequence[StreamTask], contention: Contention = ALONE) -> StreamRun:
    """Plays the tasks: when each starts and ends.

    The compute stream's work, slow-down and stalls add up to the total.
    """
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
        # Start the head of every queue that waits for nothing any more and that the host has issued.
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
        # How much each is slowed depends on which others run, so it holds until the next task starts or ends.
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
            # Nothing runs: everything that could start waits for the host.
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
    """A run that does nothing but wait."""
    return StreamRun([0.0], [seconds], {}, 0.0, {cause: seconds})
