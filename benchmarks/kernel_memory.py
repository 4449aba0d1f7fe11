"""Memory over many short steps with kernel records, on one GPU: does the process grow?

    python benchmarks/kernel_memory.py --steps 10000 --pause-ms 2 --output paced.json
    python benchmarks/kernel_memory.py --steps 60000 --output unpaced.json    # faster than lines are written
    python benchmarks/kernel_memory.py --steps 10000 --pause-ms 2 --off    # without the instrument

A step is 20 products of 256 x 256. Printed: resident memory at the first and the last sample (one in 50
steps), and the slope of a straight line through the second half.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch

import aorta
from aorta.records.reader import read_run, read_steps

SAMPLE_EVERY = 50
SYNCHRONISE_EVERY = 500


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--pause-ms", type=float, default=0.0, help="host time between two steps")
    parser.add_argument("--off", action="store_true", help="without the instrument")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    document: dict[str, Any] = {"steps": options.steps, "instrument": not options.off}
    if options.off:
        samples = run(nullcontext, options.steps, options.pause_ms)
    else:
        with tempfile.TemporaryDirectory() as folder:
            with aorta.instrument(folder, kernels="on") as recorder:
                samples = run(recorder.step, options.steps, options.pause_ms)
            document |= lines_of(Path(folder))
    half = np.array(samples[len(samples) // 2 :], dtype=np.float64)
    slope = float(np.polyfit(half[:, 0], half[:, 1], 1)[0])
    document |= {"rss_kb": samples, "slope_kb_per_1000_steps": 1000 * slope}
    print(json.dumps({**document, "rss_kb": [samples[0][1], samples[-1][1]]}, indent=1))
    if options.output is not None:
        options.output.write_text(json.dumps(document) + "\n")


def run(
    step: Callable[[], AbstractContextManager[Any]], num_steps: int, pause_ms: float
) -> list[tuple[int, int]]:
    """(step, resident kB) of every SAMPLE_EVERY-th step."""
    matrix = torch.randn(256, 256, device="cuda")
    samples = []
    for number in range(1, num_steps + 1):
        with step():
            for _ in range(20):
                matrix @ matrix
        if pause_ms:
            time.sleep(pause_ms / 1000)
        if number % SAMPLE_EVERY == 0:
            samples.append((number, resident_kb()))
        if number % SYNCHRONISE_EVERY == 0:
            torch.cuda.synchronize()
    return samples


def resident_kb() -> int:
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1])


def lines_of(folder: Path) -> dict[str, Any]:
    records = list(read_steps(folder / "rank_0_metrics.jsonl", []))
    timed = sum(record.source == "kernels" and record.overlap.compute_ms is not None for record in records)
    left_out = read_run(folder).coverage["left_out_steps"]
    return {"lines": len(records), "timed_by_kernels": timed, "left_out_steps": left_out}


if __name__ == "__main__":
    main()
