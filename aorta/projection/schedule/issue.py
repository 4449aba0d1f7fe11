"""Operations of a stage as tasks on streams, in the order in which the host issues them."""

from collections.abc import Sequence
from typing import NamedTuple

from aorta.projection.job.plan import Plan
from aorta.projection.pricing import Priced
from aorta.projection.work.lanes import COMPUTE, StreamTask
from aorta.projection.work.ops import AttentionOp, CollectiveOp, GemmOp

STREAMS = {
    "tp": "tp",
    "ep": "all_to_all",
    "cp": "context",
    "dp": "data_parallel",
    "edp": "data_parallel",
    "copies": "data_parallel",
}
KERNEL_OPS = (GemmOp, AttentionOp)
MOST_PARTS = 6
"""Operations of one compute task: the host is seen to issue them in groups of at most that many."""
BEFORE = -1
"""Number that stands for the last compute task before a Block."""


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

    def communicate(
        self,
        stream: str,
        name: str,
        category: str,
        op: str,
        seconds: float,
        dependencies: tuple[int, ...],
        size_bytes: float,
        link_share: float = 1.0,
    ) -> int:
        self._append(
            StreamTask(
                stream,
                name,
                category,
                seconds,
                dependencies,
                (),
                op,
                size_bytes=size_bytes,
                link_share=link_share,
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
            if deferred and isinstance(op, KERNEL_OPS):
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
        def send(share: float, dependencies: tuple[int, ...]) -> int:
            return self.communicate(
                STREAMS[op.axis],
                op.name,
                priced.category,
                op.op,
                priced.seconds * share,
                dependencies,
                op.size_bytes * share,
                priced.link_share,
            )

        chunk = 1 / plan.tp
        if op.overlap == "next":
            deferred.append(send(1, self.flush()))
        elif op.overlap == "chunks_next":
            dependencies = self.flush()
            self.need(send(chunk, dependencies))
            deferred.append(send(1 - chunk, dependencies))
        elif op.overlap == "chunks_previous" and self._parts:
            name, kind, gemm_s = self._parts.pop()
            self.compute(name, kind, gemm_s * chunk)
            send(1 - chunk, self.flush())
            self.compute(name, kind, gemm_s * (1 - chunk))
            self.need(send(chunk, self.flush()))
        else:
            self.need(send(1, self.flush()))
