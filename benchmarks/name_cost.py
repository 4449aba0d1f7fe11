"""What naming collectives costs their host, by CPU time of the thread within what names them.

    python benchmarks/name_cost.py [--steps 40] [--json FILE]

A step is a forward and a backward pass of 16 blocks, parallelized over the two ranks of torch's fake process
group (32 all_reduces), or 200 all_reduces outside of any module. `names`: in all steps but the few that are
looked at; `look`: in those, where a reading of the clock (0.3 us) is in each collective's time.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

import aorta
from aorta.recording import module_names

NUM_BLOCKS, NUM_PLAIN = 16, 200


def layers() -> tuple[Callable[[], None], int]:
    mesh = init_device_mesh("cpu", (2,))
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)) for _ in range(NUM_BLOCKS))
    )
    for block in model:
        parallelize_module(block, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})

    def step() -> None:
        model(torch.ones(4, 8, requires_grad=True)).sum().backward()

    return step, 2 * NUM_BLOCKS


def plain() -> tuple[Callable[[], None], int]:
    tensor = torch.ones(4)

    def step() -> None:
        for _ in range(NUM_PLAIN):
            dist.all_reduce(tensor)

    return step, NUM_PLAIN


def measure(make: Callable[[], tuple[Callable[[], None], int]], steps: int) -> dict[str, float]:
    body, num_calls = make()
    spent: dict[str, list[float]] = {"names": [], "look": []}
    with tempfile.TemporaryDirectory() as folder, aorta.instrument(folder) as recorder:
        names: Any = recorder._module_names
        end_body, look_at = names.end_body, names._look_at
        num_ns = [0]

        def timed(function: Callable[[Any], None]) -> Callable[[Any], None]:
            def call(argument: Any) -> None:
                begin = time.thread_time_ns()
                function(argument)
                num_ns[0] += time.thread_time_ns() - begin

            return call

        names.end_body, names._look_at = timed(end_body), timed(look_at)
        for number in range(8 + steps):
            is_looked_at = number % 4 == 0
            if number >= 8:
                names._num_steps = module_names.LOOKS_EVERY if is_looked_at else 3
            num_ns[0] = 0
            with recorder.step():
                body()
            if number >= 8:
                spent["look" if is_looked_at else "names"].append(num_ns[0] / 1e3 / num_calls)
    return {"collectives": num_calls} | {
        f"{name}_us_per_collective": statistics.median(values) for name, values in spent.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    result = {
        "torch": torch.__version__,
        "layers": measure(layers, options.steps),
        "plain": measure(plain, options.steps),
    }
    dist.destroy_process_group()
    print(json.dumps(result, indent=1))
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
