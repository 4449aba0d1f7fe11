"""Lines of kernel records beside torch.profiler's kernels in neighbouring steps of the same run.

    python benchmarks/lines_beside_traces.py FOLDER [FOLDER...] --output result.json

A folder holds the records of a run (rank_<n>_metrics.jsonl, with lines of source `kernels`) and, below
torch_profiler/rank<n>/, traces of some of its other steps, which have lines of events. Medians over steps are
compared, per rank, as a share of the median communication (compute: of itself). A step of a trace is all that
ran between its line's start and end; the first and last step of each trace are left out.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from aorta.calibration.kernel_lines import read_lines, whole_steps
from aorta.records.reader import read_steps
from aorta.records.schema import StepRecord
from aorta.timeline.overlap import overlap
from aorta.traces.kineto.reader import read_kineto

NAMES = ("comm_ms", "hidden_ms", "exposed_ms", "compute_ms", "idle_ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--skip", type=int, default=6, help="first steps that are left out")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    rows = [row for folder in options.folders for row in judge(folder, options.skip)]
    for row in rows:
        show(row)
    if options.output is not None:
        options.output.write_text(json.dumps(rows, indent=1))


def judge(folder: Path, skip: int = 6) -> list[dict[str, Any]]:
    """One row per rank."""
    rows = []
    for path in sorted(folder.glob("rank_*_metrics.jsonl")):
        rank = int(path.name.split("_")[1])
        lines = [
            line
            for line in read_steps(path, [])
            if line.source == "kernels" and line.global_step >= skip and line.overlap.comm_ms is not None
        ]
        own = read_lines(folder, rank).steps
        traced = [step for trace in traces_of(folder, rank) for step in steps_of(trace, own)]
        if not lines or not traced:
            print(
                f"{folder.name} rank {rank}: {len(lines)} lines, {len(traced)} traced steps", file=sys.stderr
            )
            continue
        recorded = {name: [getattr(line.overlap, name) for line in lines] for name in NAMES}
        recorded |= {"step_ms": [line.step_ms for line in lines]}
        expected = {name: [step[name] for step in traced] for name in (*NAMES, "step_ms")}
        medians = {name: float(np.median(recorded[name])) for name in recorded}
        truth = {name: float(np.median(expected[name])) for name in expected}
        comm = truth["comm_ms"] or float("nan")
        error = {name: (medians[name] - truth[name]) / comm * 100 for name in NAMES[:3]}
        error["compute_ms"] = (medians["compute_ms"] / truth["compute_ms"] - 1) * 100
        rows.append(
            {
                "case": folder.name,
                "rank": rank,
                "num_lines": len(lines),
                "num_traced": len(traced),
                "collectives_per_line": sorted({line.num_collectives for line in lines}),
                "with_kernel": sorted(
                    {sum(c.start_ms is not None for c in line.collectives or ()) for line in lines}
                ),
                "recorded": medians,
                "traced": truth,
                "spread_traced": {name: spread(expected[name]) for name in expected},
                "error_percent": error,
            }
        )
    return rows


def traces_of(folder: Path, rank: int) -> list[Path]:
    below = folder / "torch_profiler" / f"rank{rank}"
    return sorted(path for path in below.rglob("*") if path.name.endswith((".json", ".json.gz")))


def steps_of(path: Path, own: dict[int, StepRecord]) -> list[dict[str, float]]:
    trace = read_kineto(path)
    steps = []
    for line in whole_steps(trace, own)[1:-1]:
        window = trace.window(line.start_unix_ns, line.end_unix_ns)
        record = overlap(window)
        steps.append({name: float(getattr(record, name)) for name in NAMES} | {"step_ms": window.span_ms})
    return steps


def spread(values: list[float]) -> list[float]:
    return [float(q) for q in np.percentile(values, (25, 75))]


def show(row: dict[str, Any]) -> None:
    errors = "  ".join(f"{name[:-3]} {row['error_percent'][name]:+.2f} %" for name in (*NAMES[:4],))
    traced = row["traced"]
    times = "  ".join(f"{name[:-3]} {traced[name]:.2f}" for name in ("step_ms", *NAMES[:4]))
    print(
        f"{row['case']:18s} rank {row['rank']}  {times} ms   {errors}   ({row['num_lines']} lines, "
        f"{row['num_traced']} traced; collectives {row['collectives_per_line']}, with kernel "
        f"{row['with_kernel']})",
        flush=True,
    )


if __name__ == "__main__":
    main()
