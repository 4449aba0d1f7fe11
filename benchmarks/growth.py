"""Whether a long run grows: memory and CPU time per step, and what the recorder holds, over short steps.

    torchrun --standalone --nproc_per_node 2 benchmarks/growth.py --case ddp --steps 100000 --output g.json

Slopes are those of straight lines through the second half of the run. `--off` runs the same without the
instrument. CPUs and gloo; on GPUs `--backend nccl`.
"""

import argparse
import contextlib
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import aorta
from aorta.recording.interception.works import TimedWork

SAMPLES = 200


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", choices=sorted(CASES), default="ddp")
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--backend", choices=("gloo", "nccl"), default="gloo")
    parser.add_argument("--off", action="store_true", help="without the instrument")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group(options.backend)
    device = torch.device("cuda", dist.get_rank()) if options.backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    step = CASES[options.case](device)
    with tempfile.TemporaryDirectory() as folder:
        recorder = None if options.off else aorta.instrument(folder)
        with recorder or contextlib.nullcontext():
            rows = measure(step, options.steps, recorder)
    document = summary(rows) | {
        "case": options.case,
        "instrument": not options.off,
        "steps": options.steps,
        "ranks": dist.get_world_size(),
        "torch": str(torch.__version__),
    }
    if dist.get_rank() == 0:
        print(msgspec.json.format(msgspec.json.encode(document), indent=1).decode())
        if options.output is not None:
            options.output.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=1))
    dist.destroy_process_group()


def ddp(device: torch.device) -> Callable[[], None]:
    """Four buckets, whose futures the reducer takes in C++."""
    model = DistributedDataParallel(
        nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)]).to(device), bucket_cap_mb=0.016
    )
    inputs = torch.ones(2, 64, device=device)
    return lambda: model(inputs).sum().backward()


def futures(device: torch.device) -> Callable[[], None]:
    tensors = [torch.ones(64, device=device) for _ in range(4)]

    def step() -> None:
        taken = [dist.all_reduce(tensor, async_op=True).get_future() for tensor in tensors]
        for future in taken:
            future.wait()

    return step


def never_waited(device: torch.device) -> Callable[[], None]:
    tensors = [torch.ones(64, device=device) for _ in range(4)]

    def step() -> None:
        for tensor in tensors:
            dist.all_reduce(tensor, async_op=True)
        dist.barrier()

    return step


def tensor_parallel(device: torch.device) -> Callable[[], None]:
    group = dist.group.WORLD
    assert group is not None
    tensor = torch.ones(64, device=device)

    def step() -> None:
        for _ in range(2):
            part = functional.reduce_scatter_tensor(tensor, "sum", 0, group)
            functional.all_gather_tensor(part, 0, group) + 1

    return step


CASES: dict[str, Callable[[torch.device], Callable[[], None]]] = {
    "ddp": ddp,
    "futures": futures,
    "never_waited": never_waited,
    "tensor_parallel": tensor_parallel,
}


def measure(step: Callable[[], None], num_steps: int, recorder: Any) -> list[dict[str, float]]:
    """A row every `num_steps / SAMPLES` steps."""
    rows = []
    every = max(1, num_steps // SAMPLES)
    cpu_s = time.thread_time()
    began_s = time.monotonic()
    for number in range(num_steps):
        with recorder.step() if recorder is not None else contextlib.nullcontext():
            step()
        if number % every == every - 1:
            now_cpu_s, now_s = time.thread_time(), time.monotonic()
            rows.append(
                {
                    "step": number + 1,
                    "main_thread_cpu_ms": (now_cpu_s - cpu_s) * 1e3 / every,
                    "step_ms": (now_s - began_s) * 1e3 / every,
                    "resident_kb": resident_kb(),
                    "threads": threading.active_count(),
                }
                | held(recorder)
            )
            cpu_s, began_s = now_cpu_s, now_s
    return rows


def held(recorder: Any) -> dict[str, float]:
    if recorder is None:
        return {}
    journal = recorder.journal
    return {
        "works_alive": len(TimedWork._alive),
        "in_flight": len(journal._in_flight),
        "steps_waiting": len(journal.closed),
        "groups": len(journal.groups()),
    }


def resident_kb() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4


def summary(rows: list[dict[str, float]]) -> dict[str, Any]:
    half = rows[len(rows) // 2 :]
    steps = [row["step"] for row in half]

    def slope(name: str) -> float:
        return float(np.polyfit(steps, [row[name] for row in half], 1)[0])

    return {
        "resident_kb_per_step": round(slope("resident_kb"), 4),
        "cpu_ms_first_tenth": _median(rows[: max(1, len(rows) // 10)], "main_thread_cpu_ms"),
        "cpu_ms_last_tenth": _median(rows[-max(1, len(rows) // 10) :], "main_thread_cpu_ms"),
        "last": rows[-1],
        "rows": rows[:: max(1, len(rows) // 20)],
        "python": sys.version.split()[0],
    }


def _median(rows: list[dict[str, float]], name: str) -> float:
    return round(float(np.median([row[name] for row in rows])), 4)


if __name__ == "__main__":
    main()
