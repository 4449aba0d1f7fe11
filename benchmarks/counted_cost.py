"""What does a step that is not recorded cost the thread that trains, in instructions? By valgrind, on a CPU.

    python benchmarks/counted_cost.py [LOOP ...]

Times of whole runs scatter by more than what is asked. Instructions, and the misses of a simulated processor,
do not: callgrind counts those of each thread, over steps behind the first 24. Each loop runs plain, plain
beside a thread of Python that only sleeps (from which on malloc takes locks), and under `aorta run`. A row a
loop and a way to run it: instructions of the thread a step, and the ratios to the sleeping thread's run of
instructions, of misses of the first caches (of code, of data) and of mispredicted branches.

Needs valgrind with its headers, and a C compiler. A minute a run on cores that are idle.
"""

import ctypes
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

WARM, COUNTED = 66, 8
"""Steps. Those that come again only now and then, as the ones that learn, are over by then or too few."""
SWITCH = """
#include <valgrind/callgrind.h>
void begin(void) { CALLGRIND_START_INSTRUMENTATION; }
void end(void) { CALLGRIND_STOP_INSTRUMENTATION; }
"""
WAYS = ("plain", "sleeper", "aorta")


def modules() -> Callable[[], torch.Tensor]:
    model = nn.Sequential(*(part for _ in range(150) for part in (nn.Linear(16, 16), nn.ReLU())))
    entering = torch.randn(8, 16)
    return trained(model, lambda: model(entering).square().mean())


def cells() -> Callable[[], torch.Tensor]:
    cell = nn.GRUCell(32, 32)
    entering = torch.randn(8, 32)

    def loss() -> torch.Tensor:
        state = torch.zeros(8, 32)
        for _ in range(60):
            state = cell(entering, state)
        return state.square().mean()

    return trained(cell, loss)


def averages() -> Callable[[], torch.Tensor]:
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(60)))
    means = [value.detach().clone() for value in model.parameters()]
    entering = torch.randn(8, 16)
    step = trained(model, lambda: model(entering).square().mean())

    def averaged() -> torch.Tensor:
        loss = step()
        with torch.no_grad():
            for mean, value in zip(means, model.parameters(), strict=True):
                mean.mul_(0.99).add_(value, alpha=0.01)
        return loss

    return averaged


def trained(model: nn.Module, loss_of: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()
        optimizer.step()
        return loss

    return step


LOOPS = {"modules": modules, "cells": cells, "averages": averages}


def train(loop: str, way: str, switch: str) -> None:
    """What runs under valgrind."""
    if way == "sleeper":
        threading.Thread(target=time.sleep, args=(1e6,), daemon=True).start()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    library, step = ctypes.CDLL(switch), LOOPS[loop]()
    for number in range(WARM + COUNTED):
        if number == WARM:
            library.begin()
        step()
    library.end()


def counted(loop: str, way: str, folder: Path) -> dict[str, int]:
    """Counts of the thread that trains, of all counted steps together, by callgrind's names."""
    out, run = folder / f"{loop}.{way}", folder / f"run_{loop}"
    program = [sys.executable, __file__, "train", loop, way, str(folder / "switch.so")]
    valgrind = ["valgrind", "--tool=callgrind", "--instr-atstart=no", "--separate-threads=yes"]
    command = [*valgrind, "--cache-sim=yes", "--branch-sim=yes", f"--callgrind-out-file={out}", *program]
    if way == "aorta":
        command = [sys.executable, "-m", "aorta", "run", "--no-report", "-o", str(run), "--", *command]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    if ended.returncode:
        raise SystemExit(ended.stderr[-2000:])
    if way == "aorta":
        num = json.loads((run / "run.json").read_text())["overhead"]["num_recorded"]
        assert num <= 24, f"{num} steps were recorded: some of the counted ones may be among them"
    text = Path(f"{out}-01").read_text()
    names = re.search(r"^events: (.*)$", text, re.M)
    totals = re.search(r"^totals: (.*)$", text, re.M)
    assert names
    assert totals
    return dict(zip(names[1].split(), map(int, totals[1].split()), strict=True))


def main() -> None:
    if sys.argv[1:2] == ["train"]:
        return train(*sys.argv[2:5])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = folder / "switch.c"
        source.write_text(SWITCH)
        subprocess.run(["cc", "-shared", "-fPIC", "-o", folder / "switch.so", source], check=True)
        for loop in sys.argv[1:] or LOOPS:
            counts = {way: counted(loop, way, folder) for way in WAYS}
            base = counts["sleeper"]
            for way in WAYS:
                its = counts[way]
                mispredicted = (its["Bcm"] + its["Bim"]) / (base["Bcm"] + base["Bim"])
                data = (its["D1mr"] + its["D1mw"]) / (base["D1mr"] + base["D1mw"])
                print(
                    f"{loop} {way}: {its['Ir'] / COUNTED / 1e6:.2f} million instructions a step,"
                    f" {its['Ir'] / base['Ir']:.4f}; misses of code {its['I1mr'] / base['I1mr']:.3f},"
                    f" of data {data:.3f}, of branches {mispredicted:.3f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
