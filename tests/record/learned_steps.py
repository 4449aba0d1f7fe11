"""Ranks that train on a device that is not there, with kernel records: collectives by gloo."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

import aorta
from aorta.device import backend as seam
from aorta.records.reader import read_run, read_steps
from tests.device.fake_records import RecordingBackend

REDUCE, GATHER = "ncclDevKernel_AllReduce_Sum_f32_RING_LL", "ncclDevKernel_AllGather_RING_LL"


class Program:
    """Steps of a reduction, a gathering and a reduction of another size."""

    def __init__(self) -> None:
        self.device = RecordingBackend()
        self.learner: Any = None

    def reduce(self, size: int = 4, kernel: str = REDUCE) -> None:
        dist.all_reduce(torch.ones(size))
        self.device.records.kernel(kernel)

    def gather(self) -> None:
        dist.all_gather_into_tensor(torch.empty(8), torch.ones(4))
        self.device.records.kernel(GATHER)

    def step(self, number: int) -> None:
        self.reduce()
        self.gather()
        self.reduce(16)


class OneMore(Program):
    """A reduction more in step 60, and from step 80 on."""

    def step(self, number: int) -> None:
        super().step(number)
        if number == 60 or number >= 80:
            self.reduce()


class OtherOrder(Program):
    """From step 60 on as many collectives, in another order."""

    def step(self, number: int) -> None:
        if number < 60:
            super().step(number)
        else:
            self.gather()
            self.reduce(16)
            self.reduce()
        if number == 70:  # the process that writes lines tells what it has found
            while not self.learner._is_refuted:
                time.sleep(0.01)


class OtherSizes(Program):
    """Sizes that differ from step to step."""

    def step(self, number: int) -> None:
        self.reduce(1 + number % 7)


def ran(folder: Path, make: Callable[[], Program], num_steps: int, overhead: str) -> dict[str, Any]:
    """The lines of this rank as built-ins, what run.json says, and the steps that Python of ours entered."""
    program = make()
    before = seam.use(program.device)
    seen: list[int] = []
    try:
        recorder = aorta.instrument(folder, overhead=overhead)
        with recorder:
            program.learner = recorder._sources.learner
            for number in range(num_steps):
                with recorder.step():
                    program.step(number)
                    if recorder._sources.looks:
                        seen.append(number)
    finally:
        seam.use(before)
    dist.barrier()
    lines = list(read_steps(folder / f"rank_{dist.get_rank()}_metrics.jsonl", []))
    return {
        "lines": [msgspec.to_builtins(line) for line in lines],
        "coverage": read_run(folder).coverage,
        "seen": seen,
    }
