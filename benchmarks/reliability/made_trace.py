"""A small good trace, which other files spoil: a kernel of compute and one of communication a step."""

from typing import Any

NUM_STEPS = 6
Trace = dict[str, Any]
Event = dict[str, Any]


def trace(rank: int = 0, world_size: int = 1, num_steps: int = NUM_STEPS, first_step: int = 0) -> Trace:
    """Kineto: steps of 1 ms, kernels of 0.1 ms of which 0.04 overlap."""
    events: list[Event] = []
    number = 0
    for step in range(first_step, first_step + num_steps):
        start = 1000 * (step - first_step)
        mark = {"ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{step}", "pid": 1, "tid": 1}
        events.append(mark | {"ts": start, "dur": 999, "args": {}})
        for i, name in enumerate(("gemm", "ncclDevKernel_AllReduce_Sum")):
            number += 1
            launch = {
                "ph": "X",
                "cat": "cuda_runtime",
                "name": "cudaLaunchKernel",
                "pid": 1,
                "tid": 1,
                "dur": 2,
            }
            events.append(launch | {"ts": start + 10 + 3 * i, "args": {"correlation": number}})
            kernel = {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": 7 + i, "dur": 100}
            args = {"correlation": number, "stream": 7 + i, "device": 0}
            events.append(kernel | {"ts": start + 50 + 60 * i, "args": args})
    return {"distributedInfo": {"rank": rank, "world_size": world_size}, "traceEvents": events}
