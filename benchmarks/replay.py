"""How well a replay gives the measured step back, and what-ifs against runs in which the change was made.

    python benchmarks/replay.py ../shared/data/traces/h200_fsdp4_rank*.json.gz   one set of traces
    python benchmarks/replay.py --runs runs        after benchmarks/whatif_runs.py
    python benchmarks/replay.py --scale ../shared/data/traces/a100_rank3of8_kineto.json.gz   time and memory

Predictions come from a case's traced steps and its untraced step time alone.
"""

import argparse
import gzip
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from aorta.errors import AortaError
from aorta.replay.changes import parse_changes
from aorta.replay.graph import StepGraph
from aorta.replay.load import steps_of
from aorta.replay.path import critical_path, summed
from aorta.replay.run import replay
from aorta.replay.whatif import predict


def as_it_is(name: str, steps: list[StepGraph], load_s: float) -> dict[str, Any]:
    """Errors of the replay against the trace, and how much rests on what nothing explains."""
    graph = steps[0].trace
    without = parse_changes(["no unexplained delays"])
    rows: list[dict[str, Any]] = []
    for step in steps:
        replayed, bare = replay(step), replay(step, without)
        parts = critical_path(replayed)
        for end in step.ends:
            rows.append(
                {
                    "step": step.number,
                    "rank": end.rank,
                    "measured_ms": step.measured_ms(end.rank),
                    "replayed_ms": replayed.step_ms(end.rank),
                    "without_unexplained_ms": bare.step_ms(end.rank),
                    "parts_ms": sum(part.ms for part in parts),
                    "slowest_ms": replayed.slowest_ms,
                }
            )
    return {
        "traces": name,
        "ranks": len(graph.ranks),
        "steps": len(steps),
        "nodes": len(graph.nodes),
        "arcs": len(graph.arcs),
        "recorded_edges": graph.num_recorded_edges,
        "inferred_edges": graph.num_inferred_edges,
        "contradicted_edges": graph.num_contradicted,
        "unexplained_ms": sum(graph.unexplained.values()) / 1e6,
        "room_ms": sum(graph.roomless.values()) / 1e6,
        "error": max(abs(row["replayed_ms"] / row["measured_ms"] - 1) for row in rows),
        "error_without_unexplained": max(
            abs(row["without_unexplained_ms"] / row["measured_ms"] - 1) for row in rows
        ),
        "parts_error": max(abs(row["parts_ms"] / row["slowest_ms"] - 1) for row in rows),
        "load_s": load_s,
        "rows": rows,
    }


def show_as_it_is(document: dict[str, Any]) -> None:
    print(
        f"{document['traces'][:44]:44s} {document['ranks']:2d} ranks {document['steps']} steps"
        f"  error {100 * document['error']:.3f} %"
        f"  (without unexplained delays {100 * document['error_without_unexplained']:.2f} %)"
        f"  parts {100 * document['parts_error']:.4f} %"
        f"  edges {document['recorded_edges']} recorded, {document['inferred_edges']} inferred"
    )


def median_ms(lengths: list[float]) -> float:
    return float(np.median(lengths))


def quiet_ms(lengths: list[float], num_steps: int = 4) -> float:
    """The median step of the quietest block: other programs of a machine only add to a step."""
    blocks = [lengths[i : i + num_steps] for i in range(0, len(lengths), num_steps)]
    return float(min(np.median(block) for block in blocks))


def predictions(
    case: str,
    steps: list[StepGraph],
    row: dict[str, Any],
    channels: dict[str, Any] | None,
    typical_ms: Callable[[list[float]], float] = median_ms,
) -> list[dict[str, Any]]:
    """Predicted and measured steps of every change of a case."""
    changes = [dict(change) for change in row["changes"]]
    if channels is not None and case in channels["cases"]:
        changes.append(
            {
                "name": f"{channels['channels']} channels",
                "asked": [f"{op} x{ratio:.4f}" for op, ratio in channels["ratios"].items()],
                "optional": True,
                "base_ms": row["base_ms"],
                "changed_ms": channels["cases"][case]["base_ms"],
            }
        )
    found = []
    for change in changes:
        measured_ms, own_base = typical_ms(change["changed_ms"]), typical_ms(change["base_ms"])
        one: dict[str, Any] = {
            "case": case, "change": change["name"], "asked": change["asked"], "base_ms": own_base,
            "measured_ms": measured_ms,
        }  # fmt: skip
        try:
            asked = parse_changes(change["asked"])
            if change.get("optional"):
                there = {collective.op for collective in steps[0].trace.collectives}
                asked = [a for a in asked if a.text.split()[0] in there]
            quartiles = tuple(float(ms) for ms in np.percentile(change["base_ms"], (25, 75)))
            made = predict(
                steps, asked, untraced_ms=own_base, untraced_quartiles_ms=(quartiles[0], quartiles[1])
            )
            predicted = made.predicted_ms
            one |= {
                "predicted_ms": predicted,
                "error": predicted / measured_ms - 1,
                "interval_ms": made.interval_ms,
                "next": [f"{part.kind}: {part.subject} {part.ms:.2f} ms" for part in made.next_parts[:4]],
                "notes": made.notes,
            }
        except AortaError as error:
            one["failed"] = str(error)
        found.append(one)
    return found


def show_predictions(rows: list[dict[str, Any]]) -> None:
    print(
        f"{'case':11s} {'change':22s} {'asked':44s}"
        f" {'base':>8s} {'predicted':>9s} {'measured':>8s} {'error':>7s}"
    )
    for row in rows:
        asked = " + ".join(row["asked"])[:44]
        tail = (
            f"{row['predicted_ms']:9.2f} {row['measured_ms']:8.2f} {100 * row['error']:+6.1f} %"
            if "predicted_ms" in row
            else f"{'':9s} {row['measured_ms']:8.2f}  {row['failed'][:80]}"
        )
        print(f"{row['case']:11s} {row['change']:22s} {asked:44s} {row['base_ms']:8.2f} {tail}")
    errors = sorted(abs(row["error"]) for row in rows if "error" in row)
    if errors:
        print(
            f"{len(errors)} predictions: median error {100 * np.median(errors):.2f} %,"
            f" worst {100 * errors[-1]:.2f} %"
        )
    moved = [row for row in rows if "error" in row and abs(row["measured_ms"] / row["base_ms"] - 1) > 0.02]
    right = [
        row
        for row in moved
        if (row["measured_ms"] > row["base_ms"]) == (row["predicted_ms"] > row["base_ms"])
    ]
    print(f"sign right in {len(right)} of {len(moved)} that change the step by more than 2 %")


def scale(path: Path, num_ranks: int = 8, num_events: int = 20_000) -> dict[str, Any]:
    """Seconds and memory of aorta why on copies of a step of this trace, one per rank."""
    trace = json.loads(gzip.decompress(path.read_bytes()))
    events = trace["traceEvents"]
    marks = sorted(
        (e for e in events if str(e.get("name", "")).startswith("ProfilerStep#")), key=lambda e: e["ts"]
    )
    begin = marks[1]["ts"]
    later = sorted((e for e in events if e.get("ts", 0) >= begin), key=lambda e: e["ts"])[:num_events]
    step = {**marks[1], "dur": max(e["ts"] for e in later) - begin}
    kept = [step, *(e for e in later if not str(e.get("name", "")).startswith("ProfilerStep#"))]
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(num_ranks):
            trace["distributedInfo"] = {"backend": "nccl", "rank": rank, "world_size": num_ranks}
            trace["traceEvents"] = kept
            (Path(folder) / f"rank{rank}.json.gz").write_bytes(gzip.compress(json.dumps(trace).encode(), 1))
        started = time.perf_counter()
        subprocess.run([sys.executable, "-m", "aorta", "why", folder], check=True, stdout=subprocess.DEVNULL)
        wall_s = time.perf_counter() - started
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "ranks": num_ranks, "events_per_rank": len(kept), "wall_s": wall_s,
        "cpu_s": usage.ru_utime + usage.ru_stime, "max_rss_mb": usage.ru_maxrss / 1024,
        "load_average": os.getloadavg()[0],
    }  # fmt: skip


def channel_ratios(folder: Path, measured: dict[str, Any]) -> dict[str, Any] | None:
    path = folder / "channels.json"
    if not path.exists():
        return None
    channels: dict[str, Any] = json.loads(path.read_text())
    channels["ratios"] = {
        op: channels["probes_ms"][op] / ms for op, ms in measured["probes_ms"].items() if ms > 0
    }
    return channels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("traces", nargs="*", type=Path)
    parser.add_argument("--runs", type=Path, help="folder that benchmarks/whatif_runs.py wrote")
    parser.add_argument("--quiet", action="store_true", help="judge by the quietest blocks")
    parser.add_argument("--scale", type=Path, help="trace of which a step is copied to eight ranks")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    document: dict[str, Any] = {"replays": [], "predictions": []}
    if options.traces:
        started = time.perf_counter()
        steps = steps_of(options.traces if len(options.traces) > 1 else options.traces[0])
        document["replays"].append(as_it_is(options.traces[0].name, steps, time.perf_counter() - started))
        show_as_it_is(document["replays"][-1])
        for part in summed(critical_path(replay(steps[-1])))[:12]:
            print(f"  {part.ms:9.3f} ms {part.kind:16s} {part.subject[:70]}")
    if options.runs:
        measured = json.loads((options.runs / "measured.json").read_text())
        channels = channel_ratios(options.runs, measured)
        document["environment"], document["failed"] = measured["environment"], measured["failed"]
        for case, row in measured["cases"].items():
            started = time.perf_counter()
            try:
                steps = steps_of(sorted(options.runs.glob(f"{case}_rank*.json.gz")))
            except AortaError as error:
                print(f"{case}: {error}", file=sys.stderr)
                continue
            document["replays"].append(as_it_is(case, steps, time.perf_counter() - started))
            show_as_it_is(document["replays"][-1])
            typical_ms = quiet_ms if options.quiet else median_ms
            document["predictions"] += predictions(case, steps, row, channels, typical_ms)
        show_predictions(document["predictions"])
    if options.scale:
        document["scale"] = scale(options.scale)
        print(json.dumps(document["scale"]))
    if options.output:
        options.output.write_text(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
