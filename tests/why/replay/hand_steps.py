"""Steps made by hand that several tests replay."""

from pathlib import Path

from aorta.why.replay.changes import parse_change
from aorta.why.replay.graph import StepGraph
from aorta.why.replay.load import steps_of
from aorta.why.replay.run import replay
from tests.why.replay.by_hand import COMM, COMPUTE, HandTrace

US = 0.001


def replayed_ms(step: StepGraph, *changes: str) -> float:
    return replay(step, [parse_change(change) for change in changes]).slowest_ms


def device_bound(folder: Path) -> StepGraph:
    """One step: gemms of 100 and 300 µs back to back, launched long before."""
    trace = HandTrace()
    trace.kernel("gemm_a", 10.0, 100.0)
    trace.kernel("gemm_b", 112.0, 300.0)
    trace.step(0, -1.0, trace.host)
    return steps_of(trace.write(folder))[0]


def host_bound(folder: Path) -> StepGraph:
    """Ten launches, 100 µs from one to the next; each kernel begins 5 µs after its call and takes 10."""
    trace = HandTrace(every=95.0)
    for i in range(10):
        trace.kernel("small_elementwise", trace.host + 5.0, 10.0)
        trace.scope(f"aten::op{i % 2}", trace.host - 96.0, trace.host + 1.0, "cpu_op")
    trace.step(0, -1.0, trace.host)
    return steps_of(trace.write(folder))[0]


def two_ranks(folder: Path) -> StepGraph:
    """Rank 1 computes 40 µs longer before an all_reduce of 100 µs; then both compute for 50."""
    for rank, compute in enumerate((200.0, 240.0)):
        trace = HandTrace(rank, world=2)
        trace.kernel("gemm", 20.0, compute)
        event = trace.record()
        trace.wait(COMM, event, COMPUTE)
        arrival = 20.0 + compute + 2.0
        trace.collective("allreduce", arrival, 362.0 - arrival)
        event = trace.record()
        trace.wait(COMPUTE, event, COMM)
        trace.kernel("gemm", 364.0, 50.0)
        trace.step(0, -1.0, trace.host)
        trace.write(folder)
    return steps_of(folder)[0]


def sharded(folder: Path) -> StepGraph:
    """Three units gathered in forward and again in backward, each just in time: 100 µs of transfer, then 200
    of compute that waits for it and that the next gather waits for."""
    trace = HandTrace(0, world=2)
    now, after = 50.0, None
    for unit in ("a", "b", "c", "c", "b", "a"):
        begin = trace.host
        if after is not None:
            trace.wait(COMM, after, COMPUTE)
        trace.collective("allgather", now, 100.0)
        event = trace.record()
        trace.scope(f"FSDP::all_gather ({unit})", begin - 0.5, trace.host)
        trace.wait(COMPUTE, event, COMM)
        trace.kernel("gemm", now + 102.0, 200.0)
        after = trace.record()
        now += 304.0
    trace.step(0, -1.0, trace.host)
    return steps_of(trace.write(folder))[0]


def broadcasting(folder: Path) -> StepGraph:
    """Rank 0 sends a broadcast of 30 µs and goes on; rank 1 comes to it 100 µs after it began."""
    for rank, compute in enumerate((200.0, 300.0)):
        trace = HandTrace(rank, world=2)
        trace.kernel("gemm", 20.0, compute)
        event = trace.record()
        trace.wait(COMM, event, COMPUTE)
        begin = 20.0 + compute + 2.0
        trace.collective("broadcast", begin, 30.0)
        event = trace.record()
        trace.wait(COMPUTE, event, COMM)
        trace.kernel("gemm", begin + 32.0, 50.0)
        trace.step(0, -1.0, trace.host)
        trace.write(folder)
    return steps_of(folder)[0]
