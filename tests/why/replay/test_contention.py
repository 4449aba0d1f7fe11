"""Kernels beside collectives: rates and times worked out by hand."""

from pathlib import Path

import pytest

from aorta.why.replay.changes import parse_changes
from aorta.why.replay.contention import contention
from aorta.why.replay.graph import StepGraph
from aorta.why.replay.load import steps_of
from aorta.why.replay.run import replay
from tests.why.replay.by_hand import COMM, COMPUTE, HandTrace
from tests.why.replay.hand_steps import replayed_ms

US = 1e-3


def beside(folder: Path, *, transfer: float = 140.0, lengths: tuple[float, ...] = (150.0,)) -> StepGraph:
    """Three gemms alone take 100 µs; then others begin together with an all_gather each."""
    trace = HandTrace(0, world=2)
    now = 50.0
    for _ in range(3):
        trace.kernel("gemm", now, 100.0)
        now += 102.0
    for length in lengths:
        trace.collective("allgather", now, transfer)
        trace.kernel("gemm", now, length)
        now += length + 2.0
    trace.step(0, -1.0, trace.host)
    return steps_of(trace.write(folder))[0]


def rates_of(step: StepGraph) -> dict[float, float]:
    """By the start of each kernel in µs."""
    measured, nodes = contention(step.trace), step.trace.nodes
    return {
        round(nodes.start_ns[node] / 1e3 - nodes.start_ns[measured.nodes[0]] / 1e3): rate
        for node, rate in zip(measured.nodes.tolist(), measured.rates.tolist(), strict=True)
    }


class TestRates:
    def test_time_lost_per_time_beside_a_collective(self, tmp_path):
        rates = rates_of(beside(tmp_path))
        assert rates[306] == pytest.approx(50 / 140)

    def test_a_kernel_that_never_ran_alone_has_the_rate_of_its_class(self, tmp_path):
        trace = HandTrace(0, world=2)
        now = 50.0
        for _ in range(3):
            trace.kernel("gemm", now, 100.0)
            now += 102.0
        for _ in range(3):
            trace.collective("allgather", now, 150.0)
            trace.kernel("gemm", now, 150.0)
            now += 152.0
        trace.collective("allgather", now, 300.0)
        trace.kernel("another_gemm", now, 300.0)
        trace.step(0, -1.0, trace.host)
        step = steps_of(trace.write(tmp_path))[0]
        # A third of the time is lost: of 3 x 150 and of 300.
        assert replayed_ms(step, "no contention") == pytest.approx(replayed_ms(step) - 250 * US, abs=1e-6)

    def test_a_persistent_kernel_of_two_sizes_is_not_taken_for_one(self, tmp_path):
        trace = HandTrace(0, world=2)
        now = 50.0
        for length in (100.0, 10.0, 100.0, 10.0, 10.0):
            trace.kernel("gemm", now, length)
            now += length + 2.0
        trace.collective("allgather", now, 100.0)
        trace.kernel("gemm", now, 100.0)
        trace.step(0, -1.0, trace.host)
        step = steps_of(trace.write(tmp_path))[0]
        assert replayed_ms(step, "no contention") == pytest.approx(replayed_ms(step), abs=1e-6)

    def test_no_collective_no_rate(self, tmp_path):
        trace = HandTrace()
        trace.kernel("gemm", 10.0, 100.0)
        trace.step(0, -1.0, trace.host)
        step = steps_of(trace.write(tmp_path))[0]
        assert rates_of(step) == {0: 0.0}


class TestTimes:
    def test_a_longer_collective_slows_what_runs_beside_it_for_longer(self, tmp_path):
        step = beside(tmp_path)
        # Beside all the time: 100 of work at a speed of 1 - 50 / 140.
        assert replayed_ms(step, "all_gather x2") == pytest.approx(
            replayed_ms(step) + (100 / (1 - 50 / 140) - 150) * US, abs=1e-6
        )

    def test_a_shorter_collective_slows_it_for_less(self, tmp_path):
        step = beside(tmp_path)
        # 70 µs do 45 of the work, the other 55 are done alone.
        assert replayed_ms(step, "all_gather x0.5") == pytest.approx(replayed_ms(step) - 25 * US, abs=1e-6)

    def test_a_larger_batch_loses_no_more_to_the_same_collective(self, tmp_path):
        step = beside(tmp_path)
        # 3 x (2 + 196) and 2 + 196 + 50 lost: 50 more than without; FIXED_NS of a kernel stay.
        assert replayed_ms(step, "batch x2") == pytest.approx(replayed_ms(step) + 4 * 98 * US, abs=1e-6)

    def test_a_change_of_nothing_is_the_measured_step(self, tmp_path):
        step = beside(tmp_path, lengths=(150.0, 160.0, 149.0))
        assert replayed_ms(step, "gemm x1") == pytest.approx(replayed_ms(step), abs=1e-6)

    def test_a_collective_that_waits_for_a_rank_slows_kernels_too(self, tmp_path):
        for rank in (0, 1):
            trace = HandTrace(rank, world=2)
            now = 50.0
            for _ in range(3):
                trace.kernel("gemm", now, 100.0)
                now += 102.0
            if rank == 0:
                trace.collective("allgather", now, 302.0)
                trace.kernel("gemm", now, 150.0)
            else:
                trace.kernel("late", now, 200.0)
                event = trace.record()
                trace.wait(COMM, event, COMPUTE)
                trace.collective("allgather", now + 202.0, 100.0)
            trace.step(0, -1.0, trace.host)
            trace.write(tmp_path)
        step = steps_of(tmp_path)[0]
        # A third is lost beside 302 µs; 100 µs beside the collective do 66.7, and 33.3 are done alone.
        on_time = replay(step, parse_changes(["rank 1 on time"])).step_ms(0)
        assert on_time == pytest.approx(replay(step).step_ms(0) - 16.7 * US, abs=1.1 * US)
