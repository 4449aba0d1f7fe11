"""How fast the overlap arithmetic is: one million spans, and one step of a hundred.

python benchmarks/overlap_arithmetic.py [--output FILE.json]
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from aorta.timeline.intervals import Intervals, intersect_normalised, pairs, union
from aorta.timeline.overlap import active_segments, overlap
from aorta.timeline.types import Kind, Span, Timeline

NUM_SPANS = 1_000_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args()

    comm, compute = random_spans(0), random_spans(1)
    step = hundred_spans()
    times_ms = {
        "union_and_intersection_of_1e6_spans": measure_ms(
            lambda: intersect_normalised(union(comm), union(compute)), args.repeats
        ),
        "overlap_and_segments_of_100_spans": measure_ms(
            lambda: (overlap(step), active_segments(step)), 50 * args.repeats
        ),
    }
    for name, (median, worst) in times_ms.items():
        print(f"{name:38} median {median:8.3f} ms   worst {worst:8.3f} ms")
    if args.output:
        result = {
            "python": platform.python_version(),
            "numpy": np.__version__,
            "machine": platform.machine(),
            "times_ms": {name: {"median": m, "worst": w} for name, (m, w) in times_ms.items()},
        }
        args.output.write_text(json.dumps(result, indent=2) + "\n")
        print(f"wrote {args.output}")


def random_spans(seed: int) -> Intervals:
    """Half a million spans in random order, of which many overlap."""
    rng = np.random.default_rng(seed)
    start = rng.uniform(0.0, 1e5, NUM_SPANS // 2)
    return pairs(start, start + rng.exponential(0.05, NUM_SPANS // 2))


def hundred_spans() -> Timeline:
    ops = ("all_gather", "reduce_scatter", "all_reduce")
    spans = [Span(i, i + 0.8, Kind.COMPUTE) for i in range(70)]
    spans += [Span(2 * i + 0.5, 2 * i + 1.5, Kind.COMM, ops[i % 3], "nccl") for i in range(30)]
    return Timeline.from_spans(spans, (0.0, 70.0))


def measure_ms(work: Callable[[], object], repeats: int) -> tuple[float, float]:
    work()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times), max(times)


if __name__ == "__main__":
    main()
