"""Replays of measured steps, and what-ifs against runs in which the change was made.

    torchrun --nproc_per_node 2 benchmarks/what_if.py runs --output RUNS --set fourth --pin   2 GPUs, 10 min
    python benchmarks/what_if.py predict RUNS --output what_if.csv     of what `runs` wrote, 5 min
    python benchmarks/what_if.py replay [TRACES...]                    without traces: those of AORTA_DATA
    python benchmarks/what_if.py scale [TRACE]                         time and memory on eight ranks

`runs` writes RUNS/<case>_rank<n>.json.gz (five traced steps of the unchanged case) and RUNS/measured.json:
per case the untraced step, and per change the untraced step, taken in turns with the unchanged one. --set
takes other cases and changes (changes/sets.py); --pin gives every rank cores of its own; --traces-only
measures no change. `predict` takes a case's
traced steps and its untraced step time alone.
"""

import argparse
import gzip
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from cases import Job, config_of, environment, process_group
from changes.pipeline_job import PipelineJob
from changes.programs import PROGRAMS, limited_group, synchronize
from changes.sets import (
    CASES,
    CHANGES,
    LENGTHS,
    PLANTED,
    Change,
    choose_set,
    second_optimizer_step,
    single_optimizer_step,
)
from harness import arguments, choose, data_folder, write
from torch.profiler import ProfilerActivity, profile, record_function

from aorta.errors import AortaError
from aorta.why.replay.changes import parse_changes
from aorta.why.replay.graph import StepGraph
from aorta.why.replay.load import steps_of
from aorta.why.replay.path import critical_path, summed
from aorta.why.replay.run import replay
from aorta.why.replay.whatif import predict

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TRACED_STEPS = 5


def replay_traces() -> None:
    parser = arguments("Error of the replay of traces as they are, and the parts of the critical path.")
    parser.add_argument("traces", nargs="*", type=Path, help="ranks of one run")
    options = parser.parse_args()
    traces = options.traces or sorted((data_folder() / "traces").glob("h200_fsdp4_rank*.json.gz"))
    started = time.perf_counter()
    steps = steps_of(traces if len(traces) > 1 else traces[0])
    row = as_it_is(traces[0].name, steps, time.perf_counter() - started)
    show_as_it_is(row)
    for part in summed(critical_path(replay(steps[-1])))[:12]:
        print(f"  {part.ms:9.3f} ms {part.kind:16s} {part.subject[:70]}")
    write(options.output, [row])


def predict_runs() -> None:
    parser = arguments("Predicted and measured steps of every change that `runs` made.")
    parser.add_argument("runs", type=Path, metavar="RUNS")
    options = parser.parse_args()
    measured_runs = json.loads((options.runs / "measured.json").read_text())
    rows: list[dict[str, Any]] = []
    for case, row in measured_runs["cases"].items():
        started = time.perf_counter()
        try:
            steps = steps_of(sorted(options.runs.glob(f"{case}_rank*.json.gz")))
        except AortaError as error:
            print(f"{case}: {error}", file=sys.stderr)
            continue
        show_as_it_is(as_it_is(case, steps, time.perf_counter() - started))
        rows += predictions(case, steps, row)
    show_predictions(rows)
    write(options.output, rows)


def scale_of_why() -> None:
    parser = arguments("Seconds and memory of `aorta why` on a step of a trace, copied to eight ranks.")
    parser.add_argument("trace", nargs="?", type=Path)
    options = parser.parse_args()
    row = scale(options.trace or data_folder() / "traces" / "a100_rank3of8_kineto.json.gz")
    print(row)
    write(options.output, [row])


def make_runs() -> None:
    parser = argparse.ArgumentParser(
        description="Trace cases and make their changes; needs GPUs for all but the fourth set."
    )
    parser.add_argument("--output", type=Path, required=True, metavar="RUNS")
    parser.add_argument("--cases", nargs="*")
    parser.add_argument("--seconds", type=float, default=150.0, help="no case is begun after this long")
    parser.add_argument("--set", choices=("first", "second", "third", "fourth"), default="first")
    parser.add_argument("--traces-only", action="store_true")
    parser.add_argument("--pin", action="store_true", help="every rank on cores of its own")
    options = parser.parse_args()
    if options.pin:
        pin()
    choose_set(options.set)
    if options.traces_only:
        CHANGES[:] = [Change(case, "", []) for case in dict.fromkeys(change.case for change in CHANGES)]
    begun = time.monotonic()
    name = "traces_only" if options.traces_only else "measured"
    with process_group() as device:
        rank = dist.get_rank()
        options.output.mkdir(parents=True, exist_ok=True)
        document: dict[str, Any] = {"environment": environment(), "cases": {}, "failed": {}}
        names = options.cases or list(dict.fromkeys(change.case for change in CHANGES))
        for case in names:
            late = torch.tensor([float(time.monotonic() - begun > options.seconds)], device=device)
            dist.all_reduce(late)
            if late.item():
                document["failed"][case] = "no time left"
                continue
            try:
                document["cases"][case] = measured(case, device, options.output, rank, document["failed"])
                synchronize()
            except Exception as error:  # a case that fails must not cost the others
                document["failed"][case] = repr(error)[:300]
                traceback.print_exc()
            if rank == 0:
                print(f"{case}: {time.monotonic() - begun:.0f} s", flush=True)
                (options.output / f"{name}.json").write_text(json.dumps(document, indent=1))
        if rank == 0:
            show_runs(document)


def show_runs(document: dict[str, Any]) -> None:
    """Medians of every change, and what failed."""
    for case, row in document["cases"].items():
        for change in row.get("changes", ()):
            unchanged_ms, changed_ms = (median(change[key]) for key in ("base_ms", "changed_ms"))
            print(f"{case:12s} {change['name']:22s} {unchanged_ms:9.2f} {changed_ms:9.2f}")
    for name, error in document["failed"].items():
        print(f"{name}: {error}")


def show_predictions(rows: list[dict[str, Any]]) -> None:
    head = f"{'base':>8s} {'predicted':>9s} {'measured':>8s} {'error':>7s}"
    print(f"{'case':11s} {'change':22s} {'asked':44s} {head}")
    for row in rows:
        asked = " + ".join(row["asked"])[:44]
        tail = (
            f"{row['predicted_ms']:9.2f} {row['measured_ms']:8.2f} {100 * row['error']:+6.1f} %"
            if "predicted_ms" in row
            else f"{'':9s} {row['measured_ms']:8.2f}  {row['failed'][:80]}"
        )
        print(f"{row['case']:11s} {row['change']:22s} {asked:44s} {row['base_ms']:8.2f} {tail}")
    judged = [row for row in rows if "error" in row]
    errors = sorted(abs(row["error"]) for row in judged)
    if errors:
        middle, worst = 100 * np.median(errors), 100 * errors[-1]
        print(f"{len(errors)} predictions: median error {middle:.2f} %, worst {worst:.2f} %")
    moved = [row for row in judged if abs(row["measured_ms"] / row["base_ms"] - 1) > 0.02]
    right = sum(
        (row["measured_ms"] > row["base_ms"]) == (row["predicted_ms"] > row["base_ms"]) for row in moved
    )
    print(f"sign right in {right} of {len(moved)} that change the step by more than 2 %")


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


def predictions(case: str, steps: list[StepGraph], row: dict[str, Any]) -> list[dict[str, Any]]:
    """Predicted and measured steps of every change of a case."""
    found = []
    for change in row["changes"]:
        measured_ms, own_base = median_ms(change["changed_ms"]), median_ms(change["base_ms"])
        one: dict[str, Any] = {
            "case": case, "change": change["name"], "asked": change["asked"], "base_ms": own_base,
            "measured_ms": measured_ms,
        }  # fmt: skip
        try:
            asked = parse_changes(change["asked"])
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


class HostMark:
    """A moment on the host, with the interface of an event."""

    def record(self) -> None:
        self.time_s = time.perf_counter()

    def elapsed_time(self, later: Any) -> float:
        return float(1e3 * (later.time_s - self.time_s))


def time_mark() -> Any:
    return torch.cuda.Event(enable_timing=True) if DEVICE == "cuda" else HostMark()


def timed(job: Any, change: Change) -> list[float]:
    """Milliseconds of each step of a block but the first two, of the slower rank."""
    num = LENGTHS["block"]
    marks = [time_mark() for _ in range(num + 1)]
    dist.barrier()
    synchronize()
    for mark in marks[:-1]:
        mark.record()
        step(job, change)
    marks[-1].record()
    synchronize()
    if change.hook is second_optimizer_step:
        single_optimizer_step(job)
    lengths = torch.tensor([a.elapsed_time(b) for a, b in zip(marks, marks[1:], strict=False)], device=DEVICE)
    dist.all_reduce(lengths, dist.ReduceOp.MAX)
    return [round(ms, 4) for ms in lengths.tolist()[2:]]


def step(job: Any, change: Change) -> None:
    number = job.next_step
    if change.hook is not None:
        change.hook(job, number)
    job.step()
    if change.after is not None:
        change.after(job, number)


def unchanged(case: str) -> Change:
    """The case as it is, with what is planted in it."""
    before, after = PLANTED.get(case, (None, None))
    return Change(case, "unchanged", [], before, after)


def traced(job: Any, path: Path, change: Change) -> None:
    """Traces a few steps with synchronisation events."""
    config = torch._C._profiler._ExperimentalConfig(enable_cuda_sync_events=True)
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=activities, experimental_config=config):
        step(job, change)  # the profiler's own set-up
        synchronize()
    dist.barrier()
    with profile(activities=activities, experimental_config=config) as profiler:
        for number in range(TRACED_STEPS):
            with record_function(f"ProfilerStep#{number}"):
                step(job, change)
        synchronize()
    plain = path.with_suffix("")
    profiler.export_chrome_trace(str(plain))
    with open(plain, "rb") as source, gzip.open(path, "wb", compresslevel=1) as target:
        shutil.copyfileobj(source, target)
    plain.unlink()


def made(case: str, settings: dict[str, Any], device: torch.device) -> Any:
    if "program" in CASES[case]:
        program = CASES[case]["program"] | settings.get("program", {})
        return PROGRAMS[program["kind"]](program, device)
    if "pipeline" in CASES[case]:
        pipeline = PipelineJob(CASES[case]["pipeline"] | settings, device)
        for _ in range(3):
            pipeline.step()
        synchronize()
        return pipeline
    merged = {name: dict(section) for name, section in CASES[case].items()}
    for section, values in settings.items():
        merged.setdefault(section, {}).update(values)
    job = Job(config_of(merged), device)
    for _ in range(3):
        job.step()
    synchronize()
    return job


def probe(op: str, num_bytes: int, group: dist.ProcessGroup | None = None) -> float:
    """Milliseconds of one collective by itself, median of ten."""
    num_bytes = num_bytes if DEVICE == "cuda" else num_bytes >> 12
    whole = torch.empty(num_bytes // 2, dtype=torch.bfloat16, device=DEVICE)
    part = torch.empty(num_bytes // 2 // dist.get_world_size(), dtype=torch.bfloat16, device=DEVICE)
    calls: dict[str, Callable[[], Any]] = {
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole, group=group),
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
    }
    for _ in range(3):
        calls[op]()
    lengths: list[float] = []
    for _ in range(10):
        start, end = time_mark(), time_mark()
        start.record()
        calls[op]()
        end.record()
        synchronize()
        lengths.append(start.elapsed_time(end))
    return sorted(lengths)[5]


def pin() -> None:
    """Gives every local rank an equal part of the cores, in order."""
    cores = sorted(os.sched_getaffinity(0))
    rank, num_ranks = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    num_cores = len(cores) // num_ranks
    os.sched_setaffinity(0, cores[rank * num_cores : (rank + 1) * num_cores])


def slower_collectives(change: Change) -> list[str]:
    """Words to ask for fewer channels: how much slower each collective is by itself."""
    group = limited_group(change.settings["program"]["channels"])
    return [
        f"{op} x{probe(op, size, group) / probe(op, size):.4f}" for op, size in (change.probed or {}).items()
    ]


def measured(
    case: str, device: torch.device, folder: Path, rank: int, failed: dict[str, str]
) -> dict[str, Any]:
    base, as_it_is = made(case, {}, device), unchanged(case)
    row: dict[str, Any] = {"base_ms": timed(base, as_it_is), "changes": []}
    traced(base, folder / f"{case}_rank{rank}.json.gz", as_it_is)
    for change in (change for change in CHANGES if change.case == case and change.name):
        try:
            job = made(case, change.settings, device) if change.settings else base
            asked = change.asked or slower_collectives(change)
            turns: dict[str, list[float]] = {"base_ms": [], "changed_ms": []}
            for _ in range(LENGTHS["turns"]):
                turns["base_ms"] += timed(base, as_it_is)
                turns["changed_ms"] += timed(job, change)
            if job is not base:
                job.close()
            row["changes"].append({"name": change.name, "asked": asked, **turns})
            row["base_ms"] += turns["base_ms"]
        except Exception as error:
            failed[f"{case}: {change.name}"] = repr(error)[:300]
            traceback.print_exc()
    base.close()
    return row


if __name__ == "__main__":
    parts = {"replay": replay_traces, "runs": make_runs, "predict": predict_runs, "scale": scale_of_why}
    choose(__doc__, parts)
