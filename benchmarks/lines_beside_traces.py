"""Lines of kernel records beside torch.profiler's kernels in neighbouring steps of the same run.

    python benchmarks/lines_beside_traces.py FOLDER [FOLDER...] --output result.json

A folder holds the records of a run (rank_<n>_metrics.jsonl, with lines of source `kernels`) and, below
torch_profiler/rank<n>/, traces of some of its other steps, which have lines of events. Medians over steps are
compared, per rank, as a share of the median communication (compute: of itself). A step of a trace is all that
ran between its line's start and end; the first and last step of each trace are left out.

How long ranks wait for each other differs between recorded and traced steps, since the profiler slows the
host. What does not differ is the transfer: of each collective the shortest kernel of any rank, which is that
of the rank that came last (a rank's kernel begins when its rank has come and ends when all are through).
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
from aorta.timeline.types import Kind
from aorta.traces.kineto.reader import read_kineto

NAMES = ("comm_ms", "hidden_ms", "exposed_ms", "compute_ms", "idle_ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--skip", type=int, default=6, help="first steps that are left out")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    rows = []
    for folder in options.folders:
        own = judge(folder, options.skip)
        for row in own:
            show(row)
        rows += own
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
    if rows:
        rows[0]["transfer"] = transfer(folder, skip)
    return rows


def transfer(folder: Path, skip: int) -> dict[str, Any] | None:
    """Transfer time of a step, recorded and traced (medians), and their difference in per cent."""
    recorded: dict[int, list[list[float]]] = {}
    traced: dict[int, list[list[float]]] = {}
    paths = sorted(folder.glob("rank_*_metrics.jsonl"))
    for path in paths:
        rank = int(path.name.split("_")[1])
        for line in read_steps(path, []):
            if line.source != "kernels" or line.global_step < skip or not line.collectives:
                continue
            spans = sorted(
                (c.start_ms, c.end_ms)
                for c in line.collectives
                if c.start_ms is not None and c.end_ms is not None
            )
            recorded.setdefault(line.global_step, []).append([end - start for start, end in spans])
        own = read_lines(folder, rank).steps
        for trace_path in traces_of(folder, rank):
            trace = read_kineto(trace_path)
            for line in whole_steps(trace, own)[1:-1]:
                window = trace.window(line.start_unix_ns, line.end_unix_ns)
                comm = window.kind == Kind.COMM
                order = np.argsort(window.start_ms[comm])
                lengths = (window.end_ms[comm] - window.start_ms[comm])[order]
                traced.setdefault(line.global_step, []).append(lengths.tolist())
    totals = [shortest(steps, len(paths)) for steps in (recorded, traced)]
    if not all(totals):
        return None
    lines, truth = (float(np.median(total)) for total in totals)
    return {
        "recorded_ms": lines,
        "traced_ms": truth,
        "num_recorded": len(totals[0]),
        "num_traced": len(totals[1]),
        "error_percent": (lines / truth - 1) * 100,
    }


def shortest(steps: dict[int, list[list[float]]], num_ranks: int) -> list[float]:
    """Per step that all ranks have with as many collectives: the sum of the shortest of each."""
    return [
        float(np.min(ranks, axis=0).sum())
        for ranks in steps.values()
        if len(ranks) == num_ranks and ranks[0] and len({len(rank) for rank in ranks}) == 1
    ]


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
    if transferred := row.get("transfer"):
        print(
            f"{row['case']:18s} transfer without waiting: {transferred['recorded_ms']:.3f} ms, traced "
            f"{transferred['traced_ms']:.3f}: {transferred['error_percent']:+.2f} %",
            flush=True,
        )


if __name__ == "__main__":
    main()
