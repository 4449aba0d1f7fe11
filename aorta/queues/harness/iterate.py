"""Iterations of a workload: set up on streams, forked and joined under each sync mode, timed beside legs.

    MAIN      start ──┬───────────────────────────┬── end
    stream 0          └── work of iteration i ────┤
    stream 1          └── work of iteration i ────┘

`start` and `end` are timing events of MAIN. Every stream waits for `start`; MAIN waits for every stream
before `end`.
"""

import gc
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist

from aorta.device.backend import accelerator
from aorta.device.ranks import Ranks, own_group
from aorta.device.streams import MAIN, StreamEvent, Streams, make_streams
from aorta.processes import no_garbage_collection
from aorta.queues.catalogue import Size, SyncMode
from aorta.queues.harness.pieces import PieceRecorder, Window
from aorta.queues.workload import ALONE, ITERATION, Context, Workload, WorkloadOptions

Work = Callable[[int], None]
"""Submits one iteration; the argument is its index."""

LEAST_ITERATIONS = 8
"""Fewer say nothing about their own spread."""
LAUNCH_BOUND = 0.9
"""Share of the device's time that submitting takes where the host sets the pace."""
PIECE_ROUNDS = 5
"""Rounds of each leg whose pieces are timed, at most."""


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


@contextmanager
def set_up(plan: PointPlan, ranks: Ranks) -> Iterator["WorkloadBench"]:
    """The workload set up, and torn down whatever happens, its memory given back before the next point."""
    # Streams are lent, the same ones to every point of a sweep: see kept_streams.
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
            # The next point must find the memory free: drop the last names of this one's tensors first.
            del workload, context
            gc.collect()
            if ranks.device.type != "cpu":
                accelerator().memory.empty_cache()


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

    def run(self, num: int, mode: SyncMode | None = None) -> "Timed":
        """Runs that many further iterations."""
        first, self.num_done = self.num_done, self.num_done + num
        mode = mode or self.plan.sync_mode
        return run_iterations(
            self.streams, self.workload.iteration, range(first, first + num), mode, self.recorder
        )

    def time_once(self, work: Work) -> float:
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
        self.recorder.start(ALONE if alone else ITERATION, alone)
        try:
            self.run(num, mode)
        finally:
            window = self.recorder.stop()
        self.workload.context.pieces.extend(window.pieces)
        return window


def run_iterations(
    streams: Streams, work: Work, indices: Iterable[int], mode: SyncMode, recorder: PieceRecorder
) -> "Timed":
    """Runs work(index) for each index. The host has waited for everything when this returns; what work
    raised on a thread is raised here."""
    run = {"per_iteration": _per_iteration, "end_only": _end_only, "none": _unjoined}[mode]
    streams.synchronize()
    with no_garbage_collection():  # the pause would be the harness's own, in an iteration of the workload
        began_ns = time.perf_counter_ns()
        timed = run(streams, work, indices, recorder)
        timed.wall_ms = (time.perf_counter_ns() - began_ns) / 1e6
    return timed


@dataclass
class Timed:
    """Some iterations as events and the host's clock saw them."""

    iteration_ms: list[float] = field(default_factory=list)
    """per_iteration, end_only: fork to join. none: from the last stream's end of the iteration before to
    that of this one, so that they add up to device_ms."""
    enqueue_ms: list[float] = field(default_factory=list)
    """Host time to submit each iteration, fork and join included. It includes waiting for room where the
    device's launch queue is full, which end_only and none are meant to achieve."""
    device_ms: float = 0.0
    """Divisor of throughput. per_iteration: the sum of iteration_ms; otherwise from the first fork to
    the end of the last stream's work."""
    wall_ms: float = 0.0
    """Time by the host's clock, from before the first fork until everything is done."""
    caught_up: list[bool] = field(default_factory=list)
    """end_only, none: whether the device had finished the iteration before when the host had submitted this
    one, so that it may have run dry."""

    @property
    def launch_bound(self) -> bool:
        """The device waits for the host: submitting takes 0.9 of the device's time (per_iteration), or the
        device had caught up in half of the iterations."""
        if self.caught_up:
            return 2 * sum(self.caught_up) >= len(self.caught_up)
        return sum(self.enqueue_ms) >= LAUNCH_BOUND * self.device_ms


def fork(streams: Streams) -> StreamEvent:
    """All streams follow what MAIN holds now."""
    start = streams.record(MAIN, timing=True)
    for stream in range(len(streams)):
        streams.wait(stream, start)
    return start


def join(streams: Streams) -> StreamEvent:
    """MAIN follows what all streams hold now."""
    for stream in range(len(streams)):
        streams.wait(MAIN, streams.record(stream))
    return streams.record(MAIN, timing=True)


def _submit(
    streams: Streams, work: Work, index: int, recorder: PieceRecorder, timed: Timed
) -> tuple[StreamEvent, StreamEvent]:
    began_ns = time.perf_counter_ns()
    start = fork(streams)
    recorder.forked(index, start)
    work(index)
    end = join(streams)
    timed.enqueue_ms.append((time.perf_counter_ns() - began_ns) / 1e6)
    return start, end


def _per_iteration(streams: Streams, work: Work, indices: Iterable[int], recorder: PieceRecorder) -> Timed:
    timed = Timed()
    for index in indices:
        start, end = _submit(streams, work, index, recorder, timed)
        end.synchronize()
        timed.iteration_ms.append(streams.elapsed_ms(start, end))
    streams.synchronize()
    timed.device_ms = sum(timed.iteration_ms)
    return timed


def _end_only(streams: Streams, work: Work, indices: Iterable[int], recorder: PieceRecorder) -> Timed:
    timed = Timed()
    marks: list[tuple[StreamEvent, StreamEvent]] = []
    for index in indices:
        marks.append(_submit(streams, work, index, recorder, timed))
        if len(marks) > 1:
            timed.caught_up.append(marks[-2][1].query())
    streams.synchronize()
    timed.iteration_ms = [streams.elapsed_ms(start, end) for start, end in marks]
    gaps_ms = [streams.elapsed_ms(marks[i][1], marks[i + 1][0]) for i in range(len(marks) - 1)]
    timed.device_ms = sum(timed.iteration_ms) + sum(gaps_ms)
    return timed


def _unjoined(streams: Streams, work: Work, indices: Iterable[int], recorder: PieceRecorder) -> Timed:
    timed = Timed()
    start = fork(streams)  # the only one: iterations follow each other as their own events order them
    ends: list[list[StreamEvent]] = []
    for index in indices:
        recorder.forked(index, start)
        submitted_ns = time.perf_counter_ns()
        work(index)
        ends.append([streams.record(stream, timing=True) for stream in range(len(streams))])
        timed.enqueue_ms.append((time.perf_counter_ns() - submitted_ns) / 1e6)
        if len(ends) > 1:
            timed.caught_up.append(all(event.query() for event in ends[-2]))
    join(streams)
    streams.synchronize()
    # elapsed_ms is a float32 on a device: short distances, added up per stream, keep the microseconds.
    at_ms = [0.0] * len(streams)
    previous: list[StreamEvent] = [start] * len(streams)
    done_ms = [0.0]
    for marks in ends:
        at_ms = [
            offset_ms + streams.elapsed_ms(a, b)
            for offset_ms, a, b in zip(at_ms, previous, marks, strict=True)
        ]
        previous = marks
        done_ms.append(max(at_ms))
    timed.iteration_ms = [late - early for early, late in zip(done_ms, done_ms[1:], strict=False)]
    timed.device_ms = done_ms[-1]
    return timed


def time_legs(bench: WorkloadBench) -> dict[str, list[float]]:
    """Fork to join of every leg and of the iteration, one of each a round; {} where there are no legs.

    Rounds in one process see the same clocks, heat and neighbours, so that differences within a round are
    those between the programs. The pieces of some further rounds are added to the context.
    """
    plan, context = bench.plan, bench.workload.context
    legs: dict[str, Work] = dict(bench.workload.legs())
    if not legs or not plan.leg_rounds:
        return {}
    works = {ITERATION: bench.workload.iteration, **legs}
    for name in works:
        bench.time_once(works[name])  # a leg's first run may compile or allocate
    names = list(works)
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(_num_rounds(bench, works)):
        for place in range(len(names)):
            name = names[(turn + place) % len(names)]  # no leg always runs after the same one
            times[name].append(bench.time_once(works[name]))
    for name in legs if plan.piece_iterations else ():
        bench.recorder.start(name)
        try:
            for _ in range(min(plan.piece_iterations, PIECE_ROUNDS)):
                bench.time_once(works[name])
        finally:
            context.pieces.extend(bench.recorder.stop().pieces)
    return times


def _num_rounds(bench: WorkloadBench, works: dict[str, Work]) -> int:
    """Rounds that fit the budget; the same number on every rank."""
    plan = bench.plan
    if plan.budget_s is None:
        return plan.leg_rounds
    began_s = time.perf_counter()
    for work in works.values():
        bench.time_once(work)
    return bench.affordable(plan.leg_rounds, time.perf_counter() - began_s)
