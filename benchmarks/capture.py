"""Kernel windows of a training run against a separate reading of their traces, and the launchers.

    python benchmarks/capture.py --ranks 2 --output capture.csv

1. scripts/launch_cuda.sh trains on all ranks with two profiler windows. Every line of source kineto is
   compared with the exported trace, read again here with json and plain interval arithmetic.
2. Two agents on this machine (NNODES=2 over loopback, half of the GPUs each) train with windows
   of the profiler; the ranks in the records are checked.
3. A window that a forked child exports, on CUDA: what such a trace lacks.

Needs GPUs; 3 min with 2. Exit status 1 where something does not agree.
"""

import argparse
import gzip
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from decimal import Decimal
from pathlib import Path
from typing import Any

from harness import ROOT, arguments, write

sys.path.insert(0, str(ROOT))

Spans = list[tuple[int, int]]

TOLERANCE_MS = 0.002
"""Both readings are of the same integers; the lines went through floats."""
MODEL = [
    "model.hidden=2048", "model.ffn=5632", "model.num_layers=4", "model.num_heads=32", "model.num_kv_heads=8",
    "model.vocab_size=32000", "data.seq_len=1024", "training.batch_size=2", "logging.tensorboard=false",
]  # fmt: skip
WINDOWS = ["profiling.enabled=true", "profiling.wait=4", "profiling.warmup=1", "profiling.active=4"]
RUN_LIMIT_S = 120
AGENT_END_S = 40
"""torchrun gives its ranks 30 s."""


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--keep", type=Path, help="folder for the runs, to look at their traces")
    parser.add_argument("--settings", nargs="*", default=MODEL, help="model and data of the runs")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runs = Path(folder) if options.keep is None else options.keep
        results = [
            windows(runs / "windows", options),
            two_agents(runs / "two_agents", options),
            child_export(runs / "child", options),
        ]
    write(options.output, results)
    return 0 if all(result["right"] for result in results) else 1


# ---- 1 -----------------------------------------------------------------------------------------


def windows(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    settings = [*options.settings, "training.max_steps=24", "profiling.repeat=2", *WINDOWS]
    fault, wall_s = launch(folder, settings, [{}])
    if fault is not None:
        return failed("windows", fault)
    rows: list[dict[str, Any]] = []
    for rank in range(options.ranks):
        traces = sorted((folder / "torch_profiler" / f"rank{rank}").glob("*.pt.trace.json"))
        rows += compare(folder, rank, traces)
    run = json.loads((folder / "run.json").read_text())
    worst_ms = max((row["worst_ms"] for row in rows), default=None)
    found = sorted({row["rank"] for row in rows})
    checks = run["coverage"].get("kernel_windows", [])
    leftovers = sum(c["num_records_without_kernel"] + c["num_kernels_without_record"] for c in checks)
    result = {
        "part": "windows",
        "wall_s": wall_s,
        "num_lines": len(rows),
        "worst_ms": worst_ms,
        "ranks_with_lines": found,
        "kernel_windows": checks,
        "profiled_steps": run["coverage"].get("profiled_steps"),
        "lines": rows,
        "right": found == list(range(options.ranks))
        and worst_ms is not None
        and worst_ms < TOLERANCE_MS
        and len(checks) == 2
        and leftovers == 0,
    }
    print(
        f"windows: {len(rows)} lines of source kineto from {len(found)} ranks, worst difference {worst_ms} ms"
    )
    print(f"  collectives without partner in rank 0's windows: {leftovers}")
    return result


def compare(folder: Path, rank: int, traces: Iterable[Path]) -> list[dict[str, Any]]:
    """Numbers of each line of source kineto beside those of the trace that holds its window."""
    read = [(path.name, *device_work(path)) for path in traces]
    if not read:
        return []
    lines = (folder / f"rank_{rank}_metrics.jsonl").read_text().splitlines()
    rows = []
    for line in map(json.loads, lines):
        if line["source"] != "kineto":
            continue
        start_ns = line["start_unix_ns"]
        end_ns = start_ns + int(line["step_ms"] * 1e6)
        # The trace with the most work in the window: another window's has none.
        name, comm, compute = max(read, key=lambda one: len(clip(one[1] + one[2], start_ns, end_ns)))
        comm, compute = union(clip(comm, start_ns, end_ns)), union(clip(compute, start_ns, end_ns))
        hidden = intersection(comm, compute)
        again = {
            "comm_ms": length_ms(comm),
            "compute_ms": length_ms(compute),
            "hidden_ms": length_ms(hidden),
            "exposed_ms": length_ms(comm) - length_ms(hidden),
        }
        line_ms = {key: line["overlap"][key] for key in again}
        worst_ms = max(abs(again[key] - line_ms[key]) for key in again)
        rows.append(
            {
                "rank": rank, "step": line["global_step"], "trace": name, "line": line_ms, "again": again,
                "worst_ms": worst_ms,
            }
        )  # fmt: skip
    return rows


def device_work(path: Path) -> tuple[Spans, Spans]:
    """Kernels in Unix ns: (communication by name, all others)."""
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    trace = json.loads(data, parse_float=Decimal)
    base_ns = int(trace.get("baseTimeNanoseconds", 0))
    comm: Spans = []
    compute: Spans = []
    for event in trace["traceEvents"]:
        if event.get("cat") == "kernel":
            start_ns = base_ns + int(round(Decimal(event["ts"]) * 1000))
            span = (start_ns, start_ns + int(round(Decimal(event["dur"]) * 1000)))
            (comm if "nccl" in event["name"].lower() else compute).append(span)
    return comm, compute


def clip(spans: Spans, start: int, end: int) -> Spans:
    return [(max(a, start), min(b, end)) for a, b in spans if a < end and b > start]


def union(spans: Spans) -> Spans:
    merged: Spans = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def intersection(one: Spans, other: Spans) -> Spans:
    found = []
    i = j = 0
    while i < len(one) and j < len(other):
        start, end = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if start < end:
            found.append((start, end))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return found


def length_ms(spans: Spans) -> float:
    return sum(end - start for start, end in spans) / 1e6


# ---- 2 -----------------------------------------------------------------------------------------


def two_agents(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    half = options.ranks // 2
    common = {"NNODES": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29712", "NPROC": str(half)}
    agents = [
        {**common, "NODE_RANK": str(node), "CUDA_VISIBLE_DEVICES": ",".join(visible(node * half, half))}
        for node in range(2)
    ]
    settings = [*options.settings, "training.max_steps=14", "profiling.enabled=true", "profiling.wait=3"]
    fault, wall_s = launch(folder, settings, agents)
    if fault is not None:
        return failed("two agents", fault)
    found: dict[int, dict[str, Any]] = {}
    for path in sorted(folder.glob("rank_*_metrics.jsonl")):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        kernels = [line["global_step"] for line in lines if line["source"] == "kineto"]
        found[lines[0]["rank"]] = {
            "world_size": lines[0]["world_size"],
            "num_steps": sum(line["source"] == "events" for line in lines),
            "kernel_steps": kernels,
        }
    expected = {"world_size": options.ranks, "num_steps": 14, "kernel_steps": [4, 10]}
    print(f"two agents: ranks {sorted(found)}, one step in 6 traced: {found[0]['kernel_steps']}")
    return {
        "part": "two agents",
        "wall_s": wall_s,
        "ranks": found,
        "right": found == {rank: expected for rank in range(options.ranks)},
    }


def visible(first: int, num: int) -> list[str]:
    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    return (names.split(",") if names else [str(i) for i in range(64)])[first : first + num]


# ---- 3 -----------------------------------------------------------------------------------------


def child_export(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Let a forked child export on CUDA; its trace may lack the device's properties."""
    settings = [*options.settings, "training.max_steps=12", *WINDOWS, "profiling.export=child"]
    fault, wall_s = launch(folder, [*settings, "profiling.export_timeout_s=20"], [{}])
    if fault is not None:
        return failed("child", fault)
    traces = sorted((folder / "torch_profiler" / "rank0").glob("*.pt.trace.json"))
    said: dict[str, Any] = {"num_traces": len(traces), "is_json": None}
    if traces:
        try:
            trace = json.loads(traces[0].read_bytes())
            kernels = [e for e in trace["traceEvents"] if e.get("cat") == "kernel"]
            said |= {"is_json": True, "num_devices": len(trace.get("deviceProperties", []))}
            said["num_kernels"] = len(kernels)
        except ValueError as error:
            said |= {"is_json": False, "error": str(error)}
    print(f"child export: {said}")
    # The run must have gone on, whatever became of the trace.
    lines = (folder / "rank_0_metrics.jsonl").read_text().splitlines()
    num_steps = sum(json.loads(line)["source"] == "events" for line in lines)
    return {"part": "child", "wall_s": wall_s, **said, "num_steps": num_steps, "right": num_steps == 12}


# ---- runs --------------------------------------------------------------------------------------


def launch(folder: Path, settings: list[str], agents: list[dict[str, str]]) -> tuple[str | None, float]:
    """Run launch_cuda.sh once per agent, at the same time; (what went wrong, seconds)."""
    command = ["bash", str(ROOT / "scripts" / "launch_cuda.sh"), "config/fsdp.yaml", "--override"]
    command += [f"training.output_dir={folder}", *settings]
    started_s = time.monotonic()
    running = []
    logs = [folder.with_name(f"{folder.name}-agent{i}.log") for i in range(len(agents))]
    folder.parent.mkdir(parents=True, exist_ok=True)
    for agent, log in zip(agents, logs, strict=True):
        environment = {**os.environ, "PYTHON": sys.executable, **agent}
        with open(log, "wb") as file:  # not a pipe: that ends with the last process that holds it
            running.append(
                subprocess.Popen(
                    command, cwd=ROOT, env=environment, stdout=file, stderr=file, start_new_session=True
                )
            )
    late = [not ended(process, started_s + RUN_LIMIT_S - time.monotonic()) for process in running]
    for process in running:
        end(process)
    statuses = [process.returncode for process in running]
    fault = None
    if any(late) or any(statuses):
        outputs = [log.read_text(errors="replace")[-3000:] for log in logs]
        fault = "\n".join(["took too long" if any(late) else f"exit status {statuses}", *outputs])
    return fault, time.monotonic() - started_s


def ended(process: "subprocess.Popen[bytes]", limit_s: float) -> bool:
    try:
        process.wait(max(0.0, limit_s))
    except subprocess.TimeoutExpired:
        return False
    return True


def end(process: "subprocess.Popen[bytes]") -> None:
    """The shell and its torchrun, which ends its ranks first; they are in sessions of their own."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        if not ended(process, AGENT_END_S):
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def failed(part: str, fault: str) -> dict[str, Any]:
    print(f"{part}: {fault}")
    return {"part": part, "fault": fault, "right": False}


if __name__ == "__main__":
    sys.exit(main())
