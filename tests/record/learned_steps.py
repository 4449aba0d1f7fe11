"""Ranks that train on a device that is not there, with kernel records: collectives by gloo."""

import math
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

import aorta
from aorta.device import backend as seam
from aorta.hang.standing import BYTES_OF_TORCH, OPS_OF_TORCH
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


def of_flight_recorder(key: str) -> list[tuple[str, int]]:
    """Operations and bytes of a group's collectives so far, as torch noted them; [] where it notes none."""
    c10d: Any = torch._C._distributed_c10d
    # Not its stacks: they take long, and need the interpreter lock.
    options = {"includeCollectives": True, "includeStackTraces": False, "onlyActive": False}
    if dist.get_backend() == "nccl":
        record = c10d._dump_nccl_trace(**options)
    elif hasattr(c10d, "_dump_fr_trace"):
        record = c10d._dump_fr_trace(**options)
    else:
        return []
    entries = [entry for entry in pickle.loads(record)["entries"] if entry["process_group"][0] == key]
    return [
        (OPS_OF_TORCH.get(op := entry["profiling_name"].partition(":")[2], op), _most_bytes(entry))
        for entry in sorted(entries, key=lambda entry: entry["record_id"])
    ]


def _most_bytes(entry: dict[str, Any]) -> int:
    sizes = zip(
        [*entry["input_sizes"], *entry["output_sizes"]],
        [*entry["input_dtypes"], *entry["output_dtypes"]],
        strict=True,
    )
    return max(math.prod(size) * BYTES_OF_TORCH.get(dtype, 4) for size, dtype in sizes)


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
            happened = of_flight_recorder("0")
    finally:
        seam.use(before)
    dist.barrier()
    lines = list(read_steps(folder / f"rank_{dist.get_rank()}_metrics.jsonl", []))
    return {
        "lines": [msgspec.to_builtins(line) for line in lines],
        "coverage": read_run(folder).coverage,
        "seen": seen,
        "happened": happened,
    }
