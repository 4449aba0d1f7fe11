"""A workload set up on streams of its own, ready to be iterated."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from aorta.device.ranks import Ranks, own_group
from aorta.device.streams import Streams, make_streams
from aorta.queues.harness.iterations.loop import Timed, run_iterations
from aorta.queues.harness.iterations.pieces import PieceRecorder, Window
from aorta.queues.words import Size, SyncMode
from aorta.queues.workload import Context, Workload, WorkloadOptions

LEAST_ITERATIONS = 8
"""Fewer say nothing about their own spread."""


@dataclass(frozen=True)
class PointPlan:
    """Settings of one point's measurement."""

    workload: type[Workload]
    options: WorkloadOptions
    streams: int
    size: Size
    sync_mode: SyncMode = "per_iteration"
    iterations: int = 100
    warmup: int = 10
    seed: int = 0
    piece_iterations: int = 10
    """0: pieces are not timed, concurrency and contention are not measured."""
    leg_rounds: int = 15
    """0: legs are not run."""
    budget_s: float | None = None
    """Timed iterations are cut to fit into it, to no fewer than LEAST_ITERATIONS; pieces and legs take about
    as much again."""
    profile_dir: Path | None = None


@dataclass
class WorkloadBench:
    """A workload that is set up on its streams."""

    plan: PointPlan
    ranks: Ranks
    streams: Streams
    recorder: PieceRecorder
    workload: Workload
    num_done: int = 0
    """Iterations so far: the next one's index."""

    def run(self, num: int, mode: SyncMode | None = None) -> Timed:
        """Runs that many further iterations."""
        first, self.num_done = self.num_done, self.num_done + num
        mode = mode or self.plan.sync_mode
        return run_iterations(
            self.streams, self.workload.iteration, range(first, first + num), mode, self.recorder
        )

    def time_once(self, work: Callable[[int], None]) -> float:
        """Fork to join in ms of one further iteration of that work, the ranks starting together."""
        self.ranks.barrier()
        index, self.num_done = self.num_done, self.num_done + 1
        timed = run_iterations(self.streams, work, [index], "per_iteration", self.recorder)
        return timed.iteration_ms[0]

    def affordable(self, num_iterations: int, each_s: float) -> int:
        """Iterations that fit the budget at each_s seconds each, at least LEAST_ITERATIONS. The
        slowest rank decides: the same number on every rank, all of which must ask."""
        budget_s = self.plan.budget_s
        if budget_s is None:
            return num_iterations
        slowest_s = max(max(self.ranks.gather(each_s)), 1e-6)
        return max(min(num_iterations, int(budget_s / slowest_s)), min(LEAST_ITERATIONS, num_iterations))

    def run_pieces(self, num: int, alone: bool = False, mode: SyncMode | None = None) -> Window:
        """Runs iterations whose pieces are timed, and keeps these for the workload's own figures."""
        self.ranks.barrier()
        self.recorder.start("alone" if alone else "iteration", alone)
        try:
            self.run(num, mode)
        finally:
            window = self.recorder.stop()
        self.workload.context.pieces.extend(window.pieces)
        return window


@contextmanager
def bench(plan: PointPlan, ranks: Ranks) -> Iterator[WorkloadBench]:
    """The workload set up, and torn down whatever happens, its memory given back before the next point."""
    streams = make_streams(plan.streams, ranks.device)
    group = own_group(ranks, getattr(plan.options, "process_groups", None))
    recorder = PieceRecorder(streams)
    context = Context(
        streams=streams,
        device=ranks.device,
        size=plan.size,
        rank=ranks.rank,
        world_size=ranks.world_size,
        group=group,
        seed=plan.seed,
        span=recorder.span,
    )
    workload = plan.workload(context, plan.options)
    try:
        workload.setup()
        streams.synchronize()
        yield WorkloadBench(plan, ranks, streams, recorder, workload)
    finally:
        try:
            workload.teardown()
        finally:
            streams.close()
            if group is not None and group is not ranks.group:
                dist.destroy_process_group(group)
            del workload, context
            gc.collect()
            if ranks.device.type == "cuda":
                torch.cuda.empty_cache()
