"""Small programs that train on one GPU under kernel records. Each prints one JSON line: its steps."""

import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

import aorta
from aorta.device import kernel_records
from aorta.records.reader import read_run, read_steps
from tests.record.sampled import record_every

CUDA = [ProfilerActivity.CUDA]


class Program:
    """Twelve equal steps of ten matrix products, with hooks around them."""

    def __init__(self, every: int = 1, **options: Any) -> None:
        self.every = every
        self.folder = Path(tempfile.mkdtemp())
        self.options = options
        self.matrix = torch.randn(1024, 1024, device="cuda", dtype=torch.bfloat16)
        self.num_kernels: list[int] = []

    def run(self, before: Callable[[int], None] = lambda step: None, num_steps: int = 12) -> dict[str, Any]:
        recorder = aorta.instrument(self.folder, **self.options)
        with record_every(recorder, self.every) if self.every > 1 else recorder:
            for step in range(num_steps):
                before(step)
                with recorder.step():
                    for _ in range(10):
                        self.matrix @ self.matrix
        lines = list(read_steps(self.folder / "rank_0_metrics.jsonl", []))
        return {
            "sources": [line.source for line in lines],
            "num_kernels": [None if line.kernels is None else line.kernels.num_kernels for line in lines],
            "why_not": [line.not_measured.get("overlap") for line in lines],
            "reason": read_run(self.folder).coverage["kernel_records"]["reason"],
        }


def plain() -> dict[str, Any]:
    return Program(kernels="on").run()


def sampled() -> dict[str, Any]:
    return Program(every=4, kernels="on").run()


def events() -> dict[str, Any]:
    return Program(kernels="off").run()


def tried() -> dict[str, Any]:
    return Program(kernels="auto").run()


def profiled_inside() -> dict[str, Any]:
    """A profiler over steps 4 to 6, twice nested in a wider one that is prepared earlier."""
    traces: list[int] = []
    open_profilers: list[Any] = []

    def before(step: int) -> None:
        if step == 4:
            open_profilers.append(profile(activities=CUDA).__enter__())
        if step == 7:
            torch.cuda.synchronize()
            profiler = open_profilers.pop()
            profiler.__exit__(None, None, None)
            traces.append(count(profiler))

    return Program(kernels="on").run(before) | {"traced": traces}


def profiled_by_schedule() -> dict[str, Any]:
    traces: list[int] = []
    profiler = profile(
        activities=CUDA,
        schedule=schedule(wait=2, warmup=1, active=2, repeat=2),
        on_trace_ready=lambda p: traces.append(count(p)),
    )
    profiler.start()

    def before(step: int) -> None:
        if step:
            torch.cuda.synchronize()
            profiler.step()

    result = Program(kernels="on").run(before) | {"traced": traces}
    profiler.stop()
    return result


def profiled_around() -> dict[str, Any]:
    with profile(activities=CUDA) as profiler:
        result = Program(kernels="auto").run()
        torch.cuda.synchronize()
    return result | {"traced": [count(profiler)]}


def profiled_before_and_after() -> dict[str, Any]:
    def trace() -> int:
        with profile(activities=CUDA) as profiler:
            for _ in range(10):
                matrix @ matrix
            torch.cuda.synchronize()
        return count(profiler)

    matrix = torch.randn(512, 512, device="cuda")
    before = trace()
    result = Program(kernels="on").run()
    return result | {"traced": [before, trace()]}


def full_ring() -> dict[str, Any]:
    kernel_records.CAPACITY = 64
    return Program(kernels="on").run(lambda step: torch.cuda.synchronize())


def wrong_version() -> dict[str, Any]:
    kernel_records.CUPTI_MAJORS = (11,)
    return tried()


def failing_test() -> dict[str, Any]:
    kernel_records._TEST_KERNEL = "no kernel has this name"
    return tried()


def count(profiler: Any) -> int:
    """Kernels that a profiler recorded."""
    return sum(
        1
        for event in profiler.events()
        if event.device_type == torch.autograd.DeviceType.CUDA and "Memset" not in event.name
    )


if __name__ == "__main__":
    torch.cuda.init()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    print(json.dumps(globals()[sys.argv[1]]()))
