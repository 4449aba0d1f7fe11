"""Memory and CPU time per step of a long run of short steps, and how much the recorder holds.

    torchrun --standalone --nproc_per_node 2 benchmarks/reliability/growing.py --case ddp --steps 100000

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
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import aorta
from aorta.record.interception.works import TimedWork

SAMPLES = 200
SLOPES = ("resident_kb", "children_resident_kb", "main_thread_cpu_ms", "process_cpu_ms")
"""Columns whose slopes are given, from rows every `steps / SAMPLES` steps."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", choices=sorted(CASES), default="ddp")
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--backend", choices=("gloo", "nccl"), default="gloo")
    parser.add_argument("--off", action="store_true", help="without the instrument")
    parser.add_argument("--until-unix-s", type=float, default=float("inf"), help="the steps end then")
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
            rows = measure(step, options.steps, recorder, options.until_unix_s)
    slopes = slopes_of(rows)
    slopes_of_ranks: list[dict[str, float]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(slopes_of_ranks, slopes)
    sums = torch.tensor([[row[name] for name in SLOPES] for row in rows], dtype=torch.float64, device=device)
    dist.all_reduce(sums)
    means = (sums / dist.get_world_size()).T.tolist()
    document = summary(rows) | {
        "case": options.case,
        "instrument": not options.off,
        "steps": rows[-1]["step"],
        "ranks": dist.get_world_size(),
        "backend": options.backend,
        "torch": str(torch.__version__),
        "slopes_of_ranks": slopes_of_ranks,
        "means_of_ranks": {"step": [row["step"] for row in rows]} | dict(zip(SLOPES, means, strict=True)),
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


def fsdp(device: torch.device) -> Callable[[], None]:
    """Two units of fully_shard. The default mesh would be of GPUs wherever there are some."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(2)]).to(device)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    inputs = torch.ones(2, 64, device=device)
    return lambda: model(inputs).sum().backward()


CASES: dict[str, Callable[[torch.device], Callable[[], None]]] = {
    "ddp": ddp,
    "fsdp": fsdp,
}


def measure(
    step: Callable[[], None], num_steps: int, recorder: Any, until_unix_s: float
) -> list[dict[str, float]]:
    """A row every `num_steps / SAMPLES` steps, until that time on rank 0."""
    store = dist.distributed_c10d._get_default_store()
    rows = []
    every = max(1, num_steps // SAMPLES)
    cpu_s, process_cpu_s = time.thread_time(), time.process_time()
    began_s = time.monotonic()
    for number in range(num_steps):
        with recorder.step() if recorder is not None else contextlib.nullcontext():
            step()
        if number % every == every - 1:
            now_cpu_s, now_process_cpu_s = time.thread_time(), time.process_time()
            now_s = time.monotonic()
            rows.append(
                {
                    "step": number + 1,
                    "main_thread_cpu_ms": (now_cpu_s - cpu_s) * 1e3 / every,
                    "process_cpu_ms": (now_process_cpu_s - process_cpu_s) * 1e3 / every,
                    "step_ms": (now_s - began_s) * 1e3 / every,
                    "resident_kb": resident_kb(),
                    "children_resident_kb": sum(map(resident_kb, children())),
                    "threads": threading.active_count(),
                }
                | held(recorder)
            )
            if dist.get_rank() == 0:
                store.set(f"row/{number}", "last" if time.time() > until_unix_s else "")
            if store.get(f"row/{number}"):
                break
            cpu_s, process_cpu_s, began_s = now_cpu_s, now_process_cpu_s, now_s
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


def children() -> list[int]:
    """Processes that this one has started: on GPUs the one that writes the records."""
    paths = Path("/proc/self/task").glob("*/children")
    return [int(pid) for path in paths for pid in path.read_text().split()]


def resident_kb(pid: int | None = None) -> int:
    try:
        statm = Path(f"/proc/{pid or 'self'}/statm").read_text()
    except OSError:  # it has ended
        return 0
    return int(statm.split()[1]) * 4


def slopes_of(rows: list[dict[str, float]]) -> dict[str, float]:
    """Slopes per step of lines through the second half: resident memory in kB, CPU in ms."""
    half = rows[len(rows) // 2 :]
    steps = [row["step"] for row in half]
    return {name: float(np.polyfit(steps, [row[name] for row in half], 1)[0]) for name in SLOPES}


def summary(rows: list[dict[str, float]]) -> dict[str, Any]:
    return {
        "resident_kb_per_step": round(slopes_of(rows)["resident_kb"], 4),
        "cpu_ms_first_tenth": _median(rows[: max(1, len(rows) // 10)], "main_thread_cpu_ms"),
        "cpu_ms_last_tenth": _median(rows[-max(1, len(rows) // 10) :], "main_thread_cpu_ms"),
        "process_cpu_ms_first_tenth": _median(rows[: max(1, len(rows) // 10)], "process_cpu_ms"),
        "process_cpu_ms_last_tenth": _median(rows[-max(1, len(rows) // 10) :], "process_cpu_ms"),
        "last": rows[-1],
        "rows": rows[:: max(1, len(rows) // 20)],
        "python": sys.version.split()[0],
    }


def _median(rows: list[dict[str, float]], name: str) -> float:
    return round(float(np.median([row[name] for row in rows])), 4)


if __name__ == "__main__":
    main()
