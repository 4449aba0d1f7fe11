"""Time and memory of a report of many ranks: two runs of step records, compared.

python benchmarks/report_scale.py [--ranks 1024] [--steps 100] [--collectives 8] [--jobs 1] [--output FILE]

The command runs in a process of its own; its peak memory is what is measured.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import numpy as np

from aorta.records.schema import CollectiveRecord, StepRecord
from aorta.timeline.overlap import active_segments, overlap, stream_uses
from aorta.timeline.types import Kind, Span, Timeline

ROOT = Path(__file__).parent.parent
SIZE = 1 << 26
GROUP_SIZE = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--collectives", type=int, default=8, help="of a step")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runs = [Path(folder, name) for name in ("a", "b")]
        for seed, run in enumerate(runs):
            write_run(run, args.ranks, args.steps, args.collectives, seed)
        num_bytes = sum(path.stat().st_size for run in runs for path in run.iterdir())
        command = [sys.executable, str(ROOT / "analysis" / "overlap_report.py"), "--jobs", str(args.jobs)]
        command += ["--output", str(Path(folder, "out")), "--no-page", "--no-perfetto", "--no-parquet"]
        for run in runs:
            command += ["--log-dir", str(run), "--label", run.name]
        start = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=ROOT)
        seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    result = {
        "ranks": args.ranks,
        "steps": args.steps,
        "collectives_per_step": args.collectives,
        "jobs": args.jobs,
        "cores": os.cpu_count(),
        "read_mb": num_bytes / 1e6,
        "seconds": seconds,
        "mb_per_s": num_bytes / 1e6 / seconds,
        "peak_mib_of_the_largest_process": peak,
    }
    print(
        f"2 runs x {args.ranks} ranks x {args.steps} steps, {num_bytes / 1e6:.0f} MB: {seconds:.1f} s,"
        f" {num_bytes / 1e6 / seconds:.0f} MB/s, {peak:.0f} MiB"
    )
    if args.output:
        args.output.write_text(json.dumps(result, indent=2) + "\n")
        print(f"wrote {args.output}")


def write_run(folder: Path, num_ranks: int, num_steps: int, num_collectives: int, seed: int) -> None:
    """Every rank has the same times: what is measured does not depend on them. Groups have 8 ranks."""
    folder.mkdir()
    rng = np.random.default_rng(seed)
    steps = [step_of(i, num_collectives, num_ranks, rng) for i in range(num_steps)]
    lines = [msgspec.json.encode(step) + b"\n" for step in steps]
    for rank in range(num_ranks):
        first = rank - rank % GROUP_SIZE
        group = msgspec.json.encode(list(range(first, min(first + GROUP_SIZE, num_ranks))))
        with open(folder / f"rank_{rank}_metrics.jsonl", "wb") as file:
            for line in lines:
                line = line.replace(b'"rank":0,', b'"rank":%d,' % rank, 1)
                file.write(line.replace(b'"ranks":[]', b'"ranks":' + group))


def step_of(step: int, num_collectives: int, num_ranks: int, rng: np.random.Generator) -> StepRecord:
    compute_ms = 34 * float(rng.normal(1, 0.01))
    edges = np.linspace(2.0, compute_ms + 3.0, num_collectives + 1).tolist()
    spans = [Span(0.0, compute_ms, Kind.COMPUTE)]
    spans += [Span(edge, edge + 2.0, Kind.COMM, "all_gather", "nccl") for edge in edges[:-1]]
    line = Timeline.from_spans(
        spans, (0.0, compute_ms + 6.0), step=step, origin_unix_ns=10**18 + step * 50_000_000
    )
    return StepRecord(
        rank=0, world_size=num_ranks, epoch=0, step=step, global_step=step, loss=1.0, lr=None, grad_norm=None,
        tokens=1, source="events", start_unix_ns=line.origin_unix_ns, clock_error_us=2.0,
        step_ms=line.span_ms, between_steps_ms=0.5, host_ms=4.0, streams=stream_uses(line),
        overlap=overlap(line), active_segments=active_segments(line),
        collectives=[
            CollectiveRecord(
                op="all_gather", stream="group", group="shard", ranks=[], bytes=SIZE, dtype="bfloat16",
                seq=step * num_collectives + i, start_ms=edge, end_ms=edge + 2.0, algbw_gb_s=None,
                busbw_gb_s=None,
            )
            for i, edge in enumerate(edges[:-1])
        ],
        num_collectives=num_collectives,
    )  # fmt: skip


if __name__ == "__main__":
    main()
