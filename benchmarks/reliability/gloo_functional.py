"""Functional collectives over gloo, with and without aorta: does every job end?

    python benchmarks/reliability/gloo_functional.py --trials 40 --jobs 8 --output gloo_functional.json

A trial is two ranks, 300 steps of ten reduce-scatters and ten all-gathers whose results are waited for by
what uses them: many small works that C++ starts and waits for, while gloo's threads finish them. Trials with
and without take turns. Of one that does not end with status 0 the last lines of both ranks are kept.

Exit status 1 where a trial with aorta failed.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
NUM_RANKS = 2
LAST_LINES = 30
JOB = """
import contextlib, sys
import torch, torch.distributed as dist
import torch.distributed._functional_collectives as functional
torch.set_num_threads(1)
dist.init_process_group("gloo")
recorder = None
if sys.argv[1] == "with":
    import aorta
    recorder = aorta.instrument(sys.argv[2])
tensor = torch.ones(256, 16)
with recorder or contextlib.nullcontext():
    for _ in range(300):
        with recorder.step() if recorder else contextlib.nullcontext():
            for _ in range(10):
                part = functional.reduce_scatter_tensor(tensor, "sum", 0, dist.group.WORLD)
                whole = functional.all_gather_tensor(part, 0, dist.group.WORLD) + 1
assert float(whole[0, 0]) == 3.0
dist.destroy_process_group()
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trials", type=int, default=40, help="of each kind")
    parser.add_argument("--jobs", type=int, default=1, help="trials at a time")
    parser.add_argument("--limit-s", type=float, default=120.0, help="for one trial")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    kinds = ["with", "without"] * options.trials
    with ThreadPoolExecutor(options.jobs) as pool:
        results = list(pool.map(lambda kind: trial(kind, options.limit_s), kinds))
    counts = {
        kind: sum(r["statuses"] == [0] * NUM_RANKS for r in results if r["kind"] == kind)
        for kind in ("with", "without")
    }
    for kind, num_right in counts.items():
        print(f"{kind} aorta: {num_right} of {options.trials} ended with status 0")
    if options.output is not None:
        options.output.write_text(json.dumps(about() | {"ended": counts, "trials": results}, indent=1))
    return int(counts["with"] < options.trials)


def trial(kind: str, limit_s: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        start = time.monotonic()
        logs = [Path(folder) / f"rank{rank}.log" for rank in range(NUM_RANKS)]
        ranks = start_ranks(kind, folder, logs)
        statuses: list[int | None] = []
        for rank in ranks:
            try:
                statuses.append(rank.wait(max(limit_s - (time.monotonic() - start), 0.1)))
            except subprocess.TimeoutExpired:
                statuses.append(None)
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
                rank.wait()
        result: dict[str, Any] = {"kind": kind, "statuses": statuses, "s": time.monotonic() - start}
        if statuses != [0] * NUM_RANKS:
            result["last_lines"] = [log.read_text().splitlines()[-LAST_LINES:] for log in logs]
        print(json.dumps(result), flush=True)
        return result


def start_ranks(kind: str, folder: str, logs: list[Path]) -> list[subprocess.Popen[bytes]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = []
    for rank, log in enumerate(logs):
        environment = os.environ | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(NUM_RANKS),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            "PYTHONFAULTHANDLER": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        }
        with log.open("wb") as file:
            ranks.append(
                subprocess.Popen(
                    [sys.executable, "-W", "ignore", "-c", JOB, kind, f"{folder}/records"],
                    env=environment, stdout=file, stderr=subprocess.STDOUT,
                )
            )  # fmt: skip
    return ranks


def about() -> dict[str, Any]:
    import torch

    return {"torch": torch.__version__, "python": sys.version.split()[0], "cores": os.cpu_count()}


if __name__ == "__main__":
    sys.exit(main())
