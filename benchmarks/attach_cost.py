"""What `aorta run` costs a process: without torch, with torch that does not train, and one that trains.

    python benchmarks/attach_cost.py [--rounds 15] [--output benchmarks/results/attach_cost_cpu.json]

Whole processes with and without aorta in turn, and what aorta alone takes inside them: CPU time and time by
the clock, medians. The process of `aorta run` itself is beside the command, and is given apart.
"""

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from aorta.attach.settings import AttachSettings, environment_for
from aorta.command_line import module_environment

INSIDE = """
import sys, time
began, cpu_began = time.perf_counter(), time.process_time()
from aorta.attach import hooks
hooks.imported("torch", sys.modules["torch"])
print((time.process_time() - cpu_began) * 1e3, (time.perf_counter() - began) * 1e3)
"""
TRAINS = """
import time, torch, torch.distributed as dist
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), 0.1)  # loads torch._dynamo, which is not aorta's time
began, cpu_began = time.perf_counter(), time.process_time()
dist.init_process_group("gloo", init_method="file://{store}", rank=0, world_size=1)
print((time.process_time() - cpu_began) * 1e3, (time.perf_counter() - began) * 1e3)
"""
CASES = {"without torch": "pass", "torch, no training": "import torch"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = measure(Path(folder), given.rounds)
    print(json.dumps(result, indent=1))
    if given.output is not None:
        given.output.write_text(json.dumps(result, indent=1) + "\n")


def measure(folder: Path, rounds: int) -> dict[str, Any]:
    plain = module_environment()
    plain.pop("PYTHONDONTWRITEBYTECODE", None)  # or each process compiles aorta again
    attached = environment_for(AttachSettings(output=str(folder / "run")), plain)
    result: dict[str, Any] = {
        "command": "python benchmarks/attach_cost.py",
        "device": f"{os.cpu_count()} CPU cores, load {os.getloadavg()[0]:.1f} at the start",
        "python": platform.python_version(),
        "rounds": rounds,
        "whole_process": {},
        "inside": {},
    }
    for name, code in CASES.items():
        times: dict[str, list[tuple[float, float]]] = {"off": [], "on": []}
        for _ in range(rounds if code == "pass" else max(3, rounds // 3)):
            for key, environment in (("off", plain), ("on", attached)):
                times[key].append(process([sys.executable, "-c", code], environment))
        result["whole_process"][name] = {key: medians(values) for key, values in times.items()} | {
            "added_cpu_ms": statistics.median(
                on[0] - off[0] for on, off in zip(times["on"], times["off"], strict=True)
            )
        }
    command = [sys.executable, "-m", "aorta", "run", "-o", str(folder / "none"), "--", "true"]
    result["whole_process"]["aorta run -- true"] = medians([process(command, plain) for _ in range(rounds)])
    codes = {
        "hooks, once torch is imported": (
            "import torch\n" + INSIDE,
            plain | {"AORTA_RUN": attached["AORTA_RUN"]},
        ),
        "process group and recorder, at the first sign of training": (
            TRAINS.format(store=folder / "store"),
            attached,
        ),
        "the same process group without aorta": (TRAINS.format(store=folder / "store"), plain),
    }
    figures: dict[str, list[tuple[float, float]]] = {name: [] for name in codes}
    for _ in range(max(3, rounds // 3)):
        for name, (code, environment) in codes.items():
            (folder / "store").unlink(missing_ok=True)
            printed = subprocess.check_output([sys.executable, "-c", code], env=environment, text=True)
            cpu, wall = map(float, printed.split())
            figures[name].append((cpu, wall))
    result["inside"] = {name: medians(values) for name, values in figures.items()}
    return result


def medians(values: list[tuple[float, float]]) -> dict[str, float]:
    cpu, wall = zip(*values, strict=True)
    return {"cpu_ms": statistics.median(cpu), "wall_ms": statistics.median(wall), "least_wall_ms": min(wall)}


def process(command: list[str], environment: dict[str, str]) -> tuple[float, float]:
    """CPU time and time by the clock of a process, in ms."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, env=environment, check=True, stderr=subprocess.DEVNULL)
    wall = (time.perf_counter() - began) * 1e3
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) * 1e3, wall


if __name__ == "__main__":
    main()
