"""CPU time of a projection: in a fresh process, as a command, and as a search. Needs no GPU and no torch.

python benchmarks/projection/speed.py [--json]
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys

FIRST = """
import time
from aorta.hardware import load_hardware
from aorta.projection.model import load_model
from aorta.projection.plan import Plan
from aorta.projection.prices import Pricer
from aorta.projection.step import project
model, hardware = load_model({model!r}), load_hardware("h100")
plan = Plan(**{plan!r})
times = []
for _ in range(5):
    start = time.process_time()
    project(model, plan, Pricer(hardware, plan))
    times.append((time.process_time() - start) * 1e3)
print(times[0], sorted(times)[2])
"""
BIG = {
    "nodes": 64, "dp": 4, "tp": 8, "pp": 8, "vpp": 8, "cp": 2, "global_batch_size": 1152, "seq_len": 8192,
    "dtype": "fp8", "grad_bytes": 2, "tp_overlap": True,
}  # fmt: skip
SHARDED = {"nodes": 8, "dp": 64, "global_batch_size": 1024, "sharding": "fsdp2", "stack": "eager"}
COMMAND = ["performance", "--model", "llama3-405b", "--gpu-arch", "h100", "--nodes", "64", "--tp", "8"]
COMMAND += ["--pp", "8", "--vpp", "8", "--cp", "2", "--global-batch-size", "1152", "--seq-len", "8192"]
LARGE = ["search", "--gpu-arch", "h100", "--gpus", "512", "--global-batch-size", "1024", "--model"]
SEARCH = ["search", "--gpu-arch", "mi355x", "--gpus", "64", "--global-batch-size", "256", "--model"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", action="store_true")
    found: dict[str, float] = {}
    as_json = parser.parse_args().json
    for name, model, plan in (("405B", "llama3-405b", BIG), ("70B fsdp", "llama3-70b", SHARDED)):
        first, later = in_process(model, plan)
        found[f"{name}, first in the process, ms"] = first
        found[f"{name}, later, ms"] = later
    found["command, s"] = statistics.median(command(COMMAND) for _ in range(3))
    for model in ("llama3-70b", "mixtral-8x22b", "deepseek-v3"):
        found[f"search {model}, 64 GPUs, s"] = command([*SEARCH, model])
    found["search llama3-70b, 512 GPUs, s"] = command([*LARGE, "llama3-70b"])
    print(
        json.dumps(found) if as_json else "\n".join(f"{key:40s}{value:10.2f}" for key, value in found.items())
    )


def in_process(model: str, plan: dict[str, object]) -> tuple[float, float]:
    """Milliseconds of the first projection of a fresh process and the median of five: medians of three."""
    runs = []
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", FIRST.format(model=model, plan=plan)],
            capture_output=True,
            text=True,
            check=True,
        )
        runs.append([float(part) for part in done.stdout.split()])
    first, later = (statistics.median(run[column] for run in runs) for column in (0, 1))
    return first, later


def command(arguments: list[str]) -> float:
    """Seconds of CPU of a whole process, Python's start included."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, "-m", "aorta.projection", *arguments], stdout=subprocess.DEVNULL, check=True
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    main()
