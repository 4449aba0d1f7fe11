"""What `aorta run` costs a process: without torch, with torch that does not train, and one that trains.

    python benchmarks/attach_cost.py [--rounds 15] [--output benchmarks/results/attach_cost_cpu.json]

CPU time of whole processes with and without aorta in turn, and the CPU time inside aorta alone.
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
from pathlib import Path
from typing import Any

from aorta.attach.settings import AttachSettings, environment_for
from aorta.command_line import module_environment

INSIDE = """
import sys, time
from aorta.attach import hooks
began = time.process_time()
hooks.imported("torch", sys.modules["torch"])
print("hooks_ms", (time.process_time() - began) * 1e3)
"""
TRAINS = """
import time, torch, torch.distributed as dist
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), 0.1)  # loads torch._dynamo, which is not aorta's time
began = time.process_time()
dist.init_process_group("gloo", init_method="file://{store}", rank=0, world_size=1)
print("start_ms", (time.process_time() - began) * 1e3)
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
    attached = environment_for(AttachSettings(output=str(folder / "run")), plain)
    result: dict[str, Any] = {
        "command": "python benchmarks/attach_cost.py",
        "python": platform.python_version(),
        "rounds": rounds,
        "whole_process_cpu_ms": {},
    }
    for name, code in CASES.items():
        times: dict[str, list[float]] = {"off": [], "on": []}
        for _ in range(rounds if code == "pass" else max(3, rounds // 3)):
            times["off"].append(cpu_ms(code, plain))
            times["on"].append(cpu_ms(code, attached))
        result["whole_process_cpu_ms"][name] = {
            key: statistics.median(values) for key, values in times.items()
        }
    result["inside_ms"] = {
        "hooks, once torch is imported": inside(
            "import torch\n" + INSIDE, plain | {"AORTA_RUN": attached["AORTA_RUN"]}
        ),
        "recorder, at the first sign of training": inside(TRAINS.format(store=folder / "store"), attached),
    }
    return result


def cpu_ms(code: str, environment: dict[str, str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) * 1e3


def inside(code: str, environment: dict[str, str]) -> float:
    """Median of three processes of the figure that the code prints."""
    figures = []
    for _ in range(3):
        store = environment.get("AORTA_RUN", "")
        assert store
        for path in Path(json.loads(store)["output"]).parent.glob("store"):
            os.unlink(path)
        told = subprocess.check_output([sys.executable, "-c", code], env=environment, text=True)
        figures.append(float(told.split()[1]))
    return statistics.median(figures)


if __name__ == "__main__":
    main()
