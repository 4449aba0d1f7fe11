"""Kernel records against the kernels themselves: parts kernels, beside and memory of truth.py.

Stamps: kernels that read the device's clock at their own start and end, beside their records. Then each case
trains under the instrument, which records every step, and torch.profiler traces some of them instead (the
driver serves one). A round is a stretch of each kind, either first in turn, and each behind the same pause: a
GPU that has rested runs faster for a while, so that the first steps of a stretch are left out. Rounds are
compared pair by pair, whose differences give an interval; where step_ms differs as well, which is not taken
from kernels, the steps themselves do.

`beside` compares lines of source `kernels` with traces below torch_profiler/rank<n>/ of other steps of the
same run: medians over steps, per rank, as a share of the median communication (compute: of itself). A step of
a trace is all that ran between its line's start and end; the first and last step of each trace are left out.
How long ranks wait for each other differs between recorded and traced steps, since the profiler slows the
host. What does not differ is the transfer: of each collective the shortest kernel of any rank, which is that
of the rank that came last (a rank's kernel begins when its rank has come and ends when all are through).
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from cases import CASES, Job, config_of, process_group
from harness import arguments, median_interval, need_gpus, write
from torch.profiler import ProfilerActivity, profile

import aorta
from aorta.device.kernel_records import KernelRecords
from aorta.merge.lines import read_lines, whole_steps
from aorta.queues.probe.kernels import NEVER, NUM_SLOTS, open_kernels
from aorta.records.reader import read_run, read_steps
from aorta.records.schema import StepRecord
from aorta.steps.notes import RECORD_DTYPE, What
from aorta.timeline.overlap import overlap
from aorta.timeline.types import Kind
from aorta.traces.kineto import read_kineto
from aorta.traces.model import RankTrace

CASE_NAMES = ("fsdp", "fsdp_short", "ddp", "tp", "moe")
SETTLING, JUDGED = 6, 6
"""Steps of a stretch that are left out, then those that are compared."""
PAUSE_S = 0.3
STRETCHES_FILE = "stretches.json"
NAMES = ("comm_ms", "hidden_ms", "exposed_ms", "compute_ms", "idle_ms")
Steps = dict[int, float]
"""Global step -> ms."""
FEWEST_ROUNDS = 4
SAMPLE_EVERY = 50
SYNCHRONISE_EVERY = 500


def records() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--cases", nargs="+", default=CASE_NAMES, choices=list(CASES))
    parser.add_argument("--placements", nargs="+", default=["native"])
    parser.add_argument("--rounds", type=int, default=8)
    options = parser.parse_args()
    need_gpus()
    rows: list[dict[str, Any]] = []
    with process_group() as device, tempfile.TemporaryDirectory() as shared:
        folders: list[Any] = [shared]
        dist.broadcast_object_list(folders)
        stamps = compare_with_stamps(device)
        rows.append({"case": "stamps", **stamps})
        for name in options.cases:
            job = Job(config_of(CASES[name]), device)
            for _ in range(4):
                job.step()
            for placement in options.placements:
                folder = Path(folders[0]) / f"{name}-{placement}"
                run(job, folder, placement, options.rounds)
                dist.barrier()
                if dist.get_rank() == 0:
                    new = judge(folder)
                    coverage = json.loads((folder / "run.json").read_bytes())["coverage"]["kernel_records"]
                    for row in new:
                        row["kernel_records"] = coverage
                        show(row)
                    print("   ", json.dumps(coverage)[:300], flush=True)
                    rows += new
            job.close()
        if dist.get_rank() == 0:
            print("stamps:", json.dumps(stamps))
            write(options.output, rows)


def beside() -> None:
    parser = arguments(
        "Lines of kernel records beside torch.profiler's kernels in other steps of the same run."
    )
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--skip", type=int, default=6, help="first steps that are left out")
    options = parser.parse_args()
    rows = []
    for folder in options.folders:
        own = judge(folder, options.skip)
        for row in own:
            show(row)
        rows += own
    write(options.output, rows)


def memory() -> None:
    parser = arguments("""Memory over many short steps with kernel records, on one GPU: does the process grow?

A step is 20 products of 256 x 256. Printed: resident memory at the first and the last sample (one in 50
steps), and the slope of a straight line through the second half. Without a pause steps are faster than lines
can be written; with --pause-ms 2 they are not.
""")
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--pause-ms", type=float, default=0.0, help="host time between two steps")
    parser.add_argument("--off", action="store_true", help="without the instrument")
    options = parser.parse_args()
    need_gpus()
    row: dict[str, Any] = {"steps": options.steps, "instrument": not options.off}
    if options.off:
        samples = run_short_steps(nullcontext, options.steps, options.pause_ms)
    else:
        with tempfile.TemporaryDirectory() as folder:
            with aorta.instrument(folder, kernels="on") as recorder:
                samples = run_short_steps(recorder.step, options.steps, options.pause_ms)
            row |= lines_of(Path(folder))
    half = np.array(samples[len(samples) // 2 :], dtype=np.float64)
    slope = float(np.polyfit(half[:, 0], half[:, 1], 1)[0])
    row |= {"first_kb": samples[0][1], "last_kb": samples[-1][1], "slope_kb_per_1000_steps": 1000 * slope}
    print(row)
    write(options.output, [row])


def run(job: Job, folder: Path, placement: Any, num_rounds: int) -> None:
    traces = folder / "torch_profiler" / f"rank{dist.get_rank()}"
    stretches: list[list[int]] = []
    with aorta.instrument(folder, placement=placement, kernels="on", overhead="off") as recorder:
        traces.mkdir(parents=True)
        for number in range(2 * num_rounds):
            torch.cuda.synchronize()
            dist.barrier()
            time.sleep(PAUSE_S)
            is_traced = number % 4 in (1, 2)
            with profile(activities=[ProfilerActivity.CUDA]) if is_traced else nullcontext() as profiler:
                steps = [
                    job.step(recorder) for _ in range(SETTLING + JUDGED + 1)
                ]  # of a trace the last is lost
                torch.cuda.synchronize()
            stretches.append(steps[SETTLING:-1])
            dist.barrier()
            if profiler is not None:
                profiler.export_chrome_trace(str(traces / f"{time.time_ns()}.pt.trace.json"))
        dist.barrier()
    if dist.get_rank() == 0:
        (folder / STRETCHES_FILE).write_text(json.dumps(stretches))
    dist.barrier()


def rounds_of(folder: Path) -> dict[int, int]:
    """Global step -> round, of the steps that are compared; empty where the run is not one of `records`."""
    path = folder / STRETCHES_FILE
    stretches = json.loads(path.read_text()) if path.exists() else []
    return {step: number // 2 for number, steps in enumerate(stretches) for step in steps}


def by_round(recorded: Steps, traced: Steps, rounds: dict[int, int]) -> list[float] | None:
    """Median of a round's recorded steps over that of its traced ones, less 1, in %: the median of rounds,
    and its 95 % interval."""
    sides: list[dict[int, list[float]]] = [{}, {}]
    for side, steps in zip(sides, (recorded, traced), strict=True):
        for step, ms in steps.items():
            if step in rounds:
                side.setdefault(rounds[step], []).append(ms)
    both = sides[0].keys() & sides[1].keys()
    if len(both) < FEWEST_ROUNDS:
        return None
    ratios = [float(np.median(sides[0][one]) / np.median(sides[1][one])) for one in sorted(both)]
    return [(value - 1) * 100 for value in median_interval(ratios)]


def compare_with_stamps(device: torch.device, num: int = 200) -> dict[str, Any]:
    """Kernels that read the device's clock at their own start and end, beside their records, in us."""
    buffer = torch.zeros(NUM_SLOTS, 2, dtype=torch.int64, device=device)
    kernels = open_kernels(device, buffer)
    buffer[:, 0], buffer[:, 1] = NEVER, 0
    torch.cuda.synchronize(device)
    records = KernelRecords.open(device)
    records.discard()
    stream = torch.cuda.current_stream(device)
    first = records.mark(stream.cuda_stream)
    for slot in range(num):
        kernels.spin(stream, slot, 20_000 + 1000 * slot, 1)
    last = records.mark(stream.cuda_stream)
    torch.cuda.synchronize(device)
    records.flush()
    rows = np.frombuffer(records.take().records, RECORD_DTYPE)
    records.stop()
    records.flush(forced=True)
    marks = {int(row["name"]): row for row in rows[rows["what"] == What.MARK]}
    spins = rows[rows["what"] == What.KERNEL]
    inside = (spins["start"] >= marks[first]["end"]) & (spins["end"] <= marks[last]["start"])
    spins = np.sort(spins[inside], order="start")
    stamps_ns = buffer[:num].cpu().numpy()
    start_us = (spins["start"] - stamps_ns[:, 0]) / 1e3
    end_us = (spins["end"] - stamps_ns[:, 1]) / 1e3
    clocks_us = np.median(start_us)  # the two clocks begin elsewhere
    return {
        "num": len(spins),
        "source": kernels.source,
        "start_us": np.percentile(start_us - clocks_us, (1, 50, 99)).tolist(),
        "end_us": np.percentile(end_us - clocks_us, (1, 50, 99)).tolist(),
    }


def judge(folder: Path, skip: int = 6) -> list[dict[str, Any]]:
    """One row per rank."""
    rows = []
    rounds = rounds_of(folder)
    for path in sorted(folder.glob("rank_*_metrics.jsonl")):
        rank = int(path.name.split("_")[1])
        lines = [
            line
            for line in read_steps(path, [])
            if line.source == "kernels"
            and line.overlap.comm_ms is not None
            and is_compared(line.global_step, rounds, skip)
        ]
        own = read_lines(folder, rank).steps
        traced = dict(step for trace in traces_of(folder, rank) for step in steps_of(trace, own))
        traced = {step: row for step, row in traced.items() if is_compared(step, rounds, 0)}
        if not lines or not traced:
            print(
                f"{folder.name} rank {rank}: {len(lines)} lines, {len(traced)} traced steps", file=sys.stderr
            )
            continue
        recorded = {
            name: {line.global_step: float(getattr(line.overlap, name)) for line in lines} for name in NAMES
        }
        recorded["step_ms"] = {line.global_step: float(line.step_ms or 0.0) for line in lines}
        expected = {name: {step: row[name] for step, row in traced.items()} for name in (*NAMES, "step_ms")}
        medians = {name: float(np.median([*values.values()])) for name, values in recorded.items()}
        truth = {name: float(np.median([*values.values()])) for name, values in expected.items()}
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
                "spread_traced": {name: spread([*expected[name].values()]) for name in expected},
                "error_percent": error,
                "by_round_percent": {
                    name: by_round(recorded[name], expected[name], rounds)
                    for name in ("compute_ms", "step_ms")
                },
            }
        )
    if rows:
        rows[0]["transfer"] = transfer(folder, skip, rounds)
    return rows


def is_compared(step: int, rounds: dict[int, int], skip: int) -> bool:
    return step in rounds if rounds else step >= skip


def transfer(folder: Path, skip: int, rounds: dict[int, int]) -> dict[str, Any] | None:
    """Transfer time of a step, recorded and traced (medians), and their difference in per cent."""
    recorded: dict[int, list[list[float]]] = {}
    traced: dict[int, list[list[float]]] = {}
    paths = sorted(folder.glob("rank_*_metrics.jsonl"))
    for path in paths:
        rank = int(path.name.split("_")[1])
        for line in read_steps(path, []):
            if line.source != "kernels" or not line.collectives:
                continue
            if not is_compared(line.global_step, rounds, skip):
                continue
            spans = sorted(
                (c.start_ms, c.end_ms)
                for c in line.collectives
                if c.start_ms is not None and c.end_ms is not None
            )
            recorded.setdefault(line.global_step, []).append([end - start for start, end in spans])
        own = read_lines(folder, rank).steps
        for trace_path in traces_of(folder, rank):
            trace = trace_of(trace_path)
            for line in whole_steps(trace, own)[1:-1]:
                if not is_compared(line.global_step, rounds, 0):
                    continue
                window = trace.window(line.start_unix_ns, line.end_unix_ns)
                comm = window.kind == Kind.COMM
                order = np.argsort(window.start_ms[comm])
                lengths = (window.end_ms[comm] - window.start_ms[comm])[order]
                traced.setdefault(line.global_step, []).append(lengths.tolist())
    lines, truth = (shortest(steps, len(paths)) for steps in (recorded, traced))
    if not lines or not truth:
        return None
    recorded_ms, traced_ms = (float(np.median([*total.values()])) for total in (lines, truth))
    return {
        "recorded_ms": recorded_ms,
        "traced_ms": traced_ms,
        "num_recorded": len(lines),
        "num_traced": len(truth),
        "error_percent": (recorded_ms / traced_ms - 1) * 100,
        "by_round_percent": by_round(lines, truth, rounds),
    }


def shortest(steps: dict[int, list[list[float]]], num_ranks: int) -> Steps:
    """Sum of each collective's shortest kernel, for steps that all ranks have with as many collectives."""
    return {
        step: float(np.min(ranks, axis=0).sum())
        for step, ranks in steps.items()
        if len(ranks) == num_ranks and ranks[0] and len({len(rank) for rank in ranks}) == 1
    }


def traces_of(folder: Path, rank: int) -> list[Path]:
    below = folder / "torch_profiler" / f"rank{rank}"
    return sorted(path for path in below.rglob("*") if path.name.endswith((".json", ".json.gz")))


@cache
def trace_of(path: Path) -> RankTrace:
    """Of a file that two comparisons read."""
    return read_kineto(path)


def steps_of(path: Path, own: dict[int, StepRecord]) -> Iterator[tuple[int, dict[str, float]]]:
    trace = trace_of(path)
    for line in whole_steps(trace, own)[1:-1]:
        window = trace.window(line.start_unix_ns, line.end_unix_ns)
        record = overlap(window)
        parts = {name: float(getattr(record, name)) for name in NAMES}
        yield line.global_step, parts | {"step_ms": window.span_ms}


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
    for name, of_rounds in row["by_round_percent"].items():
        if of_rounds is not None:
            print(f"{row['case']:18s} by round: {name[:-3]} {in_words(of_rounds)}", flush=True)
    if transferred := row.get("transfer"):
        print(
            f"{row['case']:18s} transfer without waiting: {transferred['recorded_ms']:.3f} ms, traced "
            f"{transferred['traced_ms']:.3f}: {transferred['error_percent']:+.2f} %"
            + (f"; by round {in_words(found)}" if (found := transferred["by_round_percent"]) else ""),
            flush=True,
        )


def in_words(of_rounds: list[float]) -> str:
    return "{:+.2f} % [{:+.2f}, {:+.2f}]".format(*of_rounds)


def run_short_steps(
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
