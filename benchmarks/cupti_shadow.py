"""What does CUPTI that is off cost a launch? Loops bound by launches, in one process, with it and without.

    python benchmarks/cupti_shadow.py [SECONDS]

Once a kind of record has been enabled in a process, CUPTI stays in the way of its calls after the kind is
disabled, until cuptiFinalize takes it out of the process. Here it is taken out and put back in turn: blocks
come in pairs, one with CUPTI that was on and is off, one without it, in random order. A row a loop: time of
the host for a call of the loop without it, the middle of the pairs' ratios with its interval, and what the
difference is for each launch.

Only for programs like these: with CUDA graphs a process whose CUPTI was taken out fails in its kernels (CUDA
13.0), and nobody knows of a program beforehand that it captures none. So aorta never does this.
"""

import ctypes
import random
import statistics
import sys
import time
from collections.abc import Callable

import numpy as np
import torch
from in_turn import middle

from aorta.device.kernel_records import KernelRecords, cupti_path
from aorta.steps.notes import RECORD_DTYPE, What

SECONDS = float(sys.argv[1]) if len(sys.argv) > 1 else 30.0
CALLS = 6
"""Calls of a loop in a block, of which the quickest half counts."""


def loops(device: torch.device) -> dict[str, Callable[[], None]]:
    value = torch.zeros(64, device=device)
    cell = torch.nn.GRUCell(256, 256).to(device)
    entering = torch.randn(32, 256, device=device)
    weights = [torch.zeros(64, 64, device=device) for _ in range(300)]
    means = [torch.zeros(64, 64, device=device) for _ in range(300)]

    def adding() -> None:
        for _ in range(1500):
            value.add_(1)

    def recurrence() -> None:
        state = torch.zeros(32, 256, device=device)
        for _ in range(60):
            state = cell(entering, state)
        state.sum().backward()

    def averaging() -> None:
        with torch.no_grad():
            for mean, weight in zip(means, weights, strict=True):
                mean.mul_(0.99).add_(weight, alpha=0.01)

    return {"adding": adding, "recurrence": recurrence, "averaging": averaging}


def num_launches(loop: Callable[[], None], records: KernelRecords) -> int:
    """Kernels and copies of one call."""
    records.synchronize()
    records.poll(forced=True)
    records.start()
    loop()
    records.synchronize()
    records.stop()
    taken = [np.frombuffer(chunk.records, RECORD_DTYPE)["what"] for chunk in records.poll(forced=True)]
    return int((np.concatenate(taken) != What.MARK).sum())


def call_ms(loop: Callable[[], None]) -> float:
    lengths = []
    for _ in range(CALLS):
        torch.cuda.synchronize()
        began_s = time.perf_counter()
        loop()
        lengths.append(1e3 * (time.perf_counter() - began_s))
    torch.cuda.synchronize()
    return statistics.fmean(sorted(lengths)[: CALLS // 2])


def main() -> None:
    device = torch.device("cuda", 0)
    found = loops(device)
    for loop in found.values():
        call_ms(loop)
    records = KernelRecords.open(device)
    cupti = ctypes.CDLL(str(cupti_path()))
    launches = {name: num_launches(loop, records) for name, loop in found.items()}
    ratios: dict[str, list[float]] = {name: [] for name in found}
    without: dict[str, list[float]] = {name: [] for name in found}
    ends_s = time.monotonic() + SECONDS
    while time.monotonic() < ends_s:
        took: dict[bool, dict[str, float]] = {}
        for beside in random.sample((True, False), 2):
            if beside:
                records.start()
                records.stop()
            else:
                records.yield_buffers()
                if code := cupti.cuptiFinalize():
                    raise SystemExit(f"cuptiFinalize: {code}")
            took[beside] = {name: call_ms(loop) for name, loop in found.items()}
        for name in found:
            ratios[name].append(took[True][name] / took[False][name])
            without[name].append(took[False][name])
    print(torch.cuda.get_device_name(device))
    for name, num in launches.items():
        ratio, low, high = middle(ratios[name])
        ms = statistics.median(without[name])
        each = [1e3 * ms * (one - 1) / num for one in (ratio, low, high)]
        print(
            f"{name}: {num} launches, {ms:.2f} ms without, {ratio:.3f} [{low:.3f}, {high:.3f}] beside it:"
            f" {each[0]:.2f} us [{each[1]:.2f}, {each[2]:.2f}] a launch, {len(ratios[name])} pairs"
        )


if __name__ == "__main__":
    main()
