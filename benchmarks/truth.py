"""Event numbers against the kernels of the same steps.

    torchrun --nproc_per_node 2 benchmarks/truth.py --output truth.json

Each case trains under the instrument; torch.profiler (CUDA activities only: the CPU ones slow the
host enough to change what is measured) traces two windows of its steps. Window A calibrates,
window B is judged; the windows of all ranks calibrate together. Like for like: the events see the compute
stream, so they are compared with the kernels of the compute stream; the definition with the
kernels of all streams is printed beside it.

With --calibrate-on profiling, window A is what `profiling.enabled` leaves: few steps, slowed by CPU
activities, shapes and memory. Window B stays as it is.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from cases import CASES, Job, config_of, environment, process_group
from torch.profiler import ProfilerActivity, profile

import aorta
from aorta.calibration.coverage import Coverage, match_kernels, traced_steps
from aorta.records.schema import StepRecord
from aorta.steps.calibration import Calibration, Calibrator, calibrate
from aorta.timeline.overlap import overlap
from aorta.timeline.types import OverlapRecord
from aorta.traces.kineto.reader import read_kineto
from aorta.traces.model import RankTrace

JUDGED_CASES = [name for name in CASES if not name.startswith("tiny_")]
CALIBRATION_STEPS = 12
PROFILING_STEPS = 6
"""Of which three are used, about as many as the defaults of profiling.* keep."""
JUDGED_STEPS = 14
CUDA, CPU = ProfilerActivity.CUDA, ProfilerActivity.CPU


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", default=JUDGED_CASES, choices=list(CASES))
    parser.add_argument("--placements", nargs="+", default=["dedicated", "native"])
    parser.add_argument("--calibrate-on", choices=["kernels", "profiling"], default="kernels")
    parser.add_argument("--output", type=Path, default=Path("truth.json"))
    parser.add_argument("--raw", type=Path, help="also write every matched pair of record and kernel")
    options = parser.parse_args()
    results: list[dict[str, Any]] = []
    raw: list[dict[str, Any]] = []
    with process_group() as device, tempfile.TemporaryDirectory() as folder:
        if device.type != "cuda":
            raise SystemExit("truth.py compares with GPU kernels and needs a GPU for every rank")
        for name in options.cases:
            job = Job(config_of(CASES[name]), device)
            for _ in range(4):
                job.step()
            for placement in options.placements:
                in_folder = Path(folder) / f"{name}-{placement}"
                mine, pairs = measure(job, name, placement, in_folder, options.calibrate_on == "profiling")
                gathered: list[Any] = [None] * dist.get_world_size()
                dist.all_gather_object(gathered, mine)
                results += gathered
                raw.append({"case": name, "placement": placement, "rank": dist.get_rank(), "pairs": pairs})
                if dist.get_rank() == 0:
                    show(gathered)
            job.close()
        if dist.get_rank() == 0:
            about = environment() | {
                "world_size": dist.get_world_size(),
                "calibrated_on": options.calibrate_on,
                "results": results,
            }
            options.output.write_bytes(msgspec.json.format(msgspec.json.encode(about), indent=1))
            if options.raw is not None:
                options.raw.write_bytes(msgspec.json.encode(raw))


def measure(
    job: Job, name: str, placement: Any, folder: Path, full: bool
) -> tuple[dict[str, Any], list[Any]]:
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
    result = {
        "case": name,
        "placement": placement,
        "rank": dist.get_rank(),
        "host_bound": bool(np.median([r["host_bound"] for r in rows]) > 0.5),
        "calibration_steps": calibration.steps,
        "start_shift_ms": calibration.start_shift_ms(),
        "median": {key: middle([r[key] for r in rows]) for key in rows[0] if key != "step"},
        "steps": rows,
        "coverage": counts(coverage),
    }
    matched = [
        (m.step, m.op, m.stream, m.is_async, m.bytes, m.launch_ms,
         m.record_start_ms, m.record_end_ms, m.kernel_start_ms, m.kernel_end_ms)
        for m in coverage.matched
    ]  # fmt: skip
    return result, matched


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
    """From the steps of all ranks, for this one."""
    rows = [records[step] for step in steps]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, traced_steps(rows, trace, match_kernels(rows, trace)))
    calibration = calibrate([step for mine in gathered for step in mine], dist.get_rank())
    assert calibration is not None
    return calibration


def kernel_overlaps(
    trace: RankTrace, steps: list[int], records: dict[int, StepRecord]
) -> dict[int, OverlapRecord]:
    """By global step: everything that ran in the step's window, as the record has it."""
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


if __name__ == "__main__":
    main()
