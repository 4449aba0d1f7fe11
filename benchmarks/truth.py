"""Do events, kernel records and the library's own events say what kernels do? Needs a GPU for every rank.

    torchrun --nproc_per_node 2 benchmarks/truth.py --output truth.csv                # events, 5 min with 2
    python benchmarks/truth.py lines --ranks 2 --output truth_lines.csv              # runs of train.py, 6 min
    torchrun --nproc_per_node 2 benchmarks/truth.py kernels --output kernels.csv      # kernel records, 3 min
    python benchmarks/truth.py beside FOLDER...                 # kernel records of any run beside its traces
    python benchmarks/truth.py memory --steps 60000             # does a recorded process grow? one GPU
    torchrun --nproc_per_node 2 benchmarks/truth.py library --output library.csv      # NCCL's events, 3 min

Kernels, beside and memory are in truth_kernels.py, library is in truth_library.py; here are events and lines.

Each case trains under the instrument; torch.profiler (CUDA activities only: the CPU ones slow the
host enough to change what is measured) traces two windows of its steps. Window A calibrates,
window B is judged; the windows of all ranks calibrate together. Like for like: the events see the compute
stream, so they are compared with the kernels of the compute stream; the definition with the
kernels of all streams is printed beside it. With --calibrate-on profiling, window A is what
`profiling.enabled` leaves: few steps, slowed by CPU activities, shapes and memory.

`lines` judges what a run of train.py with profiling.kernels_every leaves in its step lines. Its traced steps
have both a line of the run and one of the kernels. Every second of them calibrates, as the end of a run does
(ranks with their peers), and the others are judged: errors of comm, hidden and exposed in % of the kernels'
comm, medians over steps. Nine in ten lines of the steps that no profiler touched must have calibrated
numbers, as reports ask; exit status 1 where a bound does not hold.
"""

import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from cases import CASES, Job, config_of, process_group
from harness import ROOT, arguments, choose, need_gpus, part_of, write
from torch.profiler import ProfilerActivity, profile

import aorta
from aorta.calibration.kernel_lines import Coverage, coverage_of, match_kernels, read_lines, traced_steps
from aorta.record.profiler import step_of_kernels
from aorta.records.files import steps_name
from aorta.records.reader import read_run, read_steps
from aorta.records.schema import StepRecord
from aorta.steps.calibration import Calibration, Calibrator, TracedStep, calibrate
from aorta.timeline.overlap import overlap
from aorta.timeline.types import OverlapRecord
from aorta.traces.kineto import read_kineto
from aorta.traces.model import RankTrace

JUDGED_CASES = [name for name in CASES if not name.startswith("tiny_")]
CALIBRATION_STEPS = 12
PROFILING_STEPS = 6
"""Steps of a full profiler window; three are used, about as many as the defaults of profiling.* keep."""
JUDGED_STEPS = 14
CUDA, CPU = ProfilerActivity.CUDA, ProfilerActivity.CPU
LINE_CASES = ("fsdp", "fsdp_short", "ddp", "tp", "moe")
EVERY = 8
BOUNDS = {"comm": 3.0, "hidden": 5.0, "exposed": 5.0}
HOST_BOUND = 8.0
MAY_LACK = 0.1
"""Share of lines without calibrated numbers, in states that the traces did not show. More, and a report leads
with raw ones (aorta.account.judge.leading)."""


def steps() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--cases", nargs="+", default=JUDGED_CASES, choices=list(CASES))
    parser.add_argument("--placements", nargs="+", default=["dedicated", "native"])
    parser.add_argument("--calibrate-on", choices=["kernels", "profiling"], default="kernels")
    options = parser.parse_args()
    need_gpus()
    rows: list[dict[str, Any]] = []
    with process_group() as device, tempfile.TemporaryDirectory() as folder:
        for name in options.cases:
            job = Job(config_of(CASES[name]), device)
            for _ in range(4):
                job.step()
            for placement in options.placements:
                in_folder = Path(folder) / f"{name}-{placement}"
                mine = measure(job, name, placement, in_folder, options.calibrate_on == "profiling")
                gathered: list[Any] = [None] * dist.get_world_size()
                dist.all_gather_object(gathered, mine)
                rows += gathered
                if dist.get_rank() == 0:
                    show(gathered)
            job.close()
        if dist.get_rank() == 0:
            write(options.output, rows)


def lines() -> int:
    parser = arguments("Calibrated numbers as a run of train.py leaves them in its step lines.")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--cases", nargs="+", default=LINE_CASES, choices=list(CASES))
    parser.add_argument("--steps", type=int, default=120)
    options = parser.parse_args()
    need_gpus(options.ranks)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in options.cases:
            run = Path(folder) / name
            train(name, run, options.ranks, options.steps)
            for row in judged(run, options.ranks):
                rows.append({"case": name, **row})
                show_line(rows[-1])
            write(options.output, rows)
    return 0 if rows and all(row["holds"] for row in rows) else 1


def measure(job: Job, name: str, placement: Any, folder: Path, full: bool) -> dict[str, Any]:
    records: dict[int, StepRecord] = {}
    with aorta.instrument(folder, placement=placement, kernels="off") as recorder:
        recorder.on_record(lambda record: records.update({record.global_step: record}))
        for _ in range(3):
            job.step(recorder)
        first = (
            traced_window(job, recorder, PROFILING_STEPS, folder / "a.json", full=True)
            if full
            else traced_window(job, recorder, CALIBRATION_STEPS, folder / "a.json")
        )
        for _ in range(3):
            job.step(recorder)
        second = traced_window(job, recorder, JUDGED_STEPS, folder / "b.json")
        job.step(recorder)
        torch.cuda.synchronize()
    calibration = calibration_of_all_ranks(*first, records)
    judged = kernel_overlaps(*second, records)
    coverage = match_kernels([records[step] for step in second[1]], second[0])
    calibrator = Calibrator(calibration)
    rows = [row(records[step], kernels, calibrator) for step, kernels in judged.items()]
    return {
        "case": name,
        "placement": placement,
        "rank": dist.get_rank(),
        "host_bound": bool(np.median([r["host_bound"] for r in rows]) > 0.5),
        "num_calibration_steps": len(calibration.steps),
        "median": {key: middle([r[key] for r in rows]) for key in rows[0] if key != "step"},
        "coverage": counts(coverage),
    }


def traced_window(
    job: Job, recorder: Any, num_steps: int, path: Path, *, full: bool = False
) -> tuple[RankTrace, list[int]]:
    """The trace, and the steps whose numbers are used: the first two are left out (the profiler
    misses kernels at its start), and the last (its window ends with the device drained)."""
    first = job.next_step
    with profile(
        activities=[CUDA, CPU] if full else [CUDA], record_shapes=full, profile_memory=full
    ) as profiler:
        for _ in range(num_steps):
            job.step(recorder)
        torch.cuda.synchronize()
    path.parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(path))
    return read_kineto(path), list(range(first + 2, first + num_steps - 1))


def calibration_of_all_ranks(
    trace: RankTrace, steps: list[int], records: dict[int, StepRecord]
) -> Calibration:
    """Calibration for this rank, learned from the steps of all."""
    rows = [records[step] for step in steps]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, traced_steps(rows, trace, match_kernels(rows, trace)))
    calibration = calibrate([step for mine in gathered for step in mine], dist.get_rank())
    assert calibration is not None
    return calibration


def kernel_overlaps(
    trace: RankTrace, steps: list[int], records: dict[int, StepRecord]
) -> dict[int, OverlapRecord]:
    """Overlap of the kernels in each step's window, by global step."""
    overlaps = {}
    for step in steps:
        record = records[step]
        overlaps[step] = overlap(trace.window(record.start_unix_ns, record.end_unix_ns))
    return overlaps


def row(record: StepRecord, kernels: OverlapRecord, calibrator: Calibrator) -> dict[str, Any]:
    events = record.overlap
    same = kernels.compute_stream
    assert same is not None
    assert kernels.comm_ms is not None
    comm_ms = kernels.comm_ms
    corrected = calibrator.apply(record)

    def percent_of_comm(value: float | None, truth: float) -> float:
        return float("nan") if value is None else 100.0 * (value - truth) / comm_ms

    return {
        "step": record.global_step,
        "host_bound": float(bool(events.host_bound)),
        "step_ms": record.step_ms,
        "kernel_step_ms": same.compute_ms + same.exposed_ms + same.idle_ms,
        "comm_ms": events.comm_ms,
        "kernel_comm_ms": comm_ms,
        "compute_ms": events.compute_ms,
        "kernel_compute_ms": same.compute_ms,
        "hidden_ms": events.hidden_ms,
        "kernel_hidden_ms": same.hidden_ms,
        "exposed_ms": events.exposed_ms,
        "kernel_exposed_ms": same.exposed_ms,
        "all_kernels_hidden_ms": kernels.hidden_ms,
        "all_kernels_exposed_ms": kernels.exposed_ms,
        "calibrated_compute_ms": None if corrected is None else corrected.compute_ms,
        "starved_bound_ms": events.starved_bound_ms,
        "comm_error_pct": percent_of_comm(events.comm_ms, comm_ms),
        "hidden_error_pct_of_comm": percent_of_comm(events.hidden_ms, same.hidden_ms),
        "exposed_error_pct_of_comm": percent_of_comm(events.exposed_ms, same.exposed_ms),
        "calibrated_comm_error_pct": percent_of_comm(
            None if corrected is None else corrected.comm_ms, comm_ms
        ),
        "calibrated_hidden_error_pct_of_comm": percent_of_comm(
            None if corrected is None else corrected.hidden_ms, same.hidden_ms
        ),
        "calibrated_exposed_error_pct_of_comm": percent_of_comm(
            None if corrected is None else corrected.exposed_ms, same.exposed_ms
        ),
    }


def middle(values: list[float | None]) -> float | None:
    """Median of what was measured; None where that is less than half."""
    known = [value for value in values if value is not None and not np.isnan(value)]
    return float(np.median(known)) if 2 * len(known) >= len(values) else None


def counts(coverage: Coverage) -> dict[str, Any]:
    return {
        "matched": len(coverage.matched),
        "records_without_kernel": coverage.records_without_kernel,
        "kernels_without_record": coverage.kernels_without_record,
    }


def percent(value: float | None) -> str:
    return "  n/a" if value is None else f"{value:+5.1f}"


def show(results: list[dict[str, Any]]) -> None:
    """ms of events/kernels, and errors in % of comm: raw, then calibrated."""
    for result in results:
        m, c = result["median"], result["coverage"]
        cells = [
            f"{result['case']:12s} {result['placement']:9s} rank {result['rank']}",
            "host-bound" if result["host_bound"] else "          ",
            f"step {m['step_ms']:7.2f} compute {m['compute_ms']:7.2f}/{m['kernel_compute_ms']:7.2f}",
        ]
        for name, error in (("comm", "comm_error_pct"), ("hidden", "hidden_error_pct_of_comm")):
            cells.append(
                f"{name} {m[name + '_ms']:6.2f}/{m['kernel_' + name + '_ms']:6.2f} "
                f"({percent(m[error])} {percent(m['calibrated_' + error])})"
            )
        exposed = "exposed_error_pct_of_comm"
        cells.append(f"exposed ({percent(m[exposed])} {percent(m['calibrated_' + exposed])})")
        cells.append(f"starved {m['starved_bound_ms']:5.1f}")
        cells.append(f"all-kernels hidden {m['all_kernels_hidden_ms']:6.2f}")
        left = len(c["records_without_kernel"]), len(c["kernels_without_record"])
        cells.append(f"matched {c['matched']} left {left[0]}/{left[1]}")
        print("  ".join(cells), flush=True)
        for line in (c["records_without_kernel"] + c["kernels_without_record"])[:4]:
            print("    left:", line, flush=True)


def train(name: str, run: Path, num_ranks: int, num_steps: int) -> None:
    settings = {
        f"{part}.{key}": value for part, keys in CASES[name].items() for key, value in keys.items()
    } | {
        "training.output_dir": run,
        "training.max_steps": num_steps,
        "training.checkpoint_at_end": False,
        "profiling.kernels_every": EVERY,
    }
    overrides = [f"{key}={value}".replace("=False", "=false") for key, value in settings.items()]
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(num_ranks),
        str(ROOT / "train.py"), "--config", str(ROOT / "config" / "default.yaml"), "--override",
        *overrides,
    ]  # fmt: skip
    subprocess.run(command, check=True, cwd=ROOT)


def judged(run: Path, num_ranks: int) -> list[dict[str, Any]]:
    steps = {rank: traced(run, rank) for rank in range(num_ranks)}
    learned_from = [step for rank in range(num_ranks) for step in steps[rank][1::2]]
    rows = []
    for rank in range(num_ranks):
        calibration = calibrate(learned_from, rank)
        assert calibration is not None
        calibrator = Calibrator(calibration)
        judged_steps = [one for one in (errors(step, calibrator) for step in steps[rank][2::2]) if one]
        row: dict[str, Any] = {"rank": rank, "num_judged": len(judged_steps)}
        row |= {key: median(one[key] for one in judged_steps) for key in judged_steps[0]}
        row |= lines_with_numbers(run, rank)
        bounds = {
            name: HOST_BOUND if row["host_bound"] and name != "comm" else BOUNDS[name] for name in BOUNDS
        }
        row["holds"] = row["num_without"] <= MAY_LACK * row["num_lines"] and all(
            abs(row[f"{name}_error_pct"]) <= bound for name, bound in bounds.items()
        )
        rows.append(row)
    return rows


def traced(run: Path, rank: int) -> list[TracedStep]:
    """Traced steps of the rank, in order. The first is from the start of the run and nobody uses it."""
    lines = read_lines(run, rank)
    steps: list[TracedStep] = []
    for path in sorted((run / "torch_profiler" / f"rank{rank}").glob("kernels/step_*.json.gz")):
        number = step_of_kernels(path)
        if number in lines.steps:
            trace, rows = read_kineto(path), [lines.steps[number]]
            steps += traced_steps(rows, trace, coverage_of(trace, rows))
    return steps


def errors(step: TracedStep, calibrator: Calibrator) -> dict[str, float] | None:
    """Errors in % of the kernels' comm, calibrated and raw."""
    record, kernels = step.record, overlap(step.kernels)
    truth = kernels.compute_stream
    numbers = calibrator.apply(record)
    if numbers is None or truth is None or not kernels.comm_ms:
        return None
    pairs = {
        "comm": (numbers.comm_ms, record.overlap.comm_ms, kernels.comm_ms),
        "hidden": (numbers.hidden_ms, record.overlap.hidden_ms, truth.hidden_ms),
        "exposed": (numbers.exposed_ms, record.overlap.exposed_ms, truth.exposed_ms),
    }
    found = {"kernel_comm_ms": kernels.comm_ms, "host_bound": float(bool(record.overlap.host_bound))}
    for name, (calibrated, raw, true) in pairs.items():
        found[f"{name}_error_pct"] = 100 * (calibrated - true) / kernels.comm_ms
        found[f"raw_{name}_error_pct"] = 100 * ((raw or 0.0) - true) / kernels.comm_ms
    return found


def lines_with_numbers(run: Path, rank: int) -> dict[str, Any]:
    """Lines of the steps that no profiler touched; of those without numbers, what state they were in."""
    profiled = set(read_run(run / "run.json").coverage["profiled_steps"])
    rows: list[StepRecord] = [line for line in read_steps(run / steps_name(rank)) if line.source == "events"]
    free = [row for row in rows if row.global_step not in profiled]
    without = [row for row in free if row.overlap.calibrated is None]
    states = [
        {
            "step": row.global_step,
            "step_ms": row.step_ms,
            "host_bound": row.overlap.host_bound,
            "num_segments": len(row.compute_segments or ()),
            "comm_ms_by_start": comm_by_start(row),
        }
        for row in without
    ]
    return {"num_lines": len(free), "num_without": len(without), "without": states}


def comm_by_start(row: StepRecord) -> dict[str, float]:
    found: dict[str, float] = {}
    for call in row.collectives or ():
        if call.start_ms is not None and call.end_ms is not None:
            by = call.start_by or "stream"
            found[by] = found.get(by, 0.0) + call.end_ms - call.start_ms
    return found


def show_line(row: dict[str, Any]) -> None:
    cells = [
        f"{name} {row[f'raw_{name}_error_pct']:+6.1f} -> {row[f'{name}_error_pct']:+5.1f}" for name in BOUNDS
    ]
    print(
        f"{row['case']:11} rank {row['rank']} {'host-bound' if row['host_bound'] > 0.5 else '':10} "
        f"comm {row['kernel_comm_ms']:7.2f} ms   raw -> calibrated, % of comm: {'   '.join(cells)}   "
        f"{row['num_lines'] - row['num_without']}/{row['num_lines']} lines   "
        f"{'holds' if row['holds'] else 'MISSES'}",
        flush=True,
    )


if __name__ == "__main__":
    parts = {
        "steps": steps,
        "lines": lines,
        "kernels": part_of("truth_kernels", "records"),
        "beside": part_of("truth_kernels", "beside"),
        "memory": part_of("truth_kernels", "memory"),
        "library": part_of("truth_library", "main"),
    }
    raise SystemExit(choose(__doc__, parts))
