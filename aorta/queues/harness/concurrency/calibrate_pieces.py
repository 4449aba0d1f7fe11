"""Concurrency of a workload's pieces after calibration by kernels of further iterations."""

from collections import defaultdict
from statistics import fmean
from typing import NamedTuple

from aorta.queues.harness.concurrency.kernels import traced
from aorta.queues.harness.concurrency.piece_calibration import (
    PieceCalibration,
    Uncalibrated,
    calibrate,
    calibrated,
)
from aorta.queues.harness.concurrency.piece_statistics import concurrency
from aorta.queues.harness.iterations.bench import WorkloadBench
from aorta.queues.harness.iterations.pieces import Window
from aorta.results.schema import CalibrationRecord, Concurrency

NOT_ASKED = "not asked for"


class ByKernels(NamedTuple):
    concurrency: Concurrency | None
    record: CalibrationRecord | None
    reason: str | None
    """Reason for the absence of calibrated numbers."""


def calibrate_pieces(ready: WorkloadBench, together: Window, alone: Window) -> ByKernels:
    """Calibrates `together` and `alone` by the kernels of as many further iterations. All ranks
    must call it alike; each uses its own kernels."""
    num = ready.plan.kernel_iterations
    if not num:
        return ByKernels(None, None, NOT_ASKED)
    if not together.pieces:
        return ByKernels(None, None, "the workload marks no pieces")
    if ready.ranks.device.type == "cpu":
        return ByKernels(None, None, "needs a GPU and torch.profiler")
    learned: list[Window] = []

    def windows() -> None:
        learned.append(ready.run_pieces(num, keep=False))
        learned.append(ready.run_pieces(num, alone=True, mode="per_iteration", keep=False))

    trace = traced(ready.ranks.device, windows)
    if trace.reason is not None:
        return ByKernels(None, None, trace.reason)
    try:
        multi, single = (calibrate(window, trace.kernels) for window in learned)
        has_peers = ready.ranks.world_size > 1
        calibrated_concurrency = concurrency(
            calibrated(together, multi, has_peers), calibrated(alone, single, has_peers)
        )
    except Uncalibrated as error:
        return ByKernels(None, None, str(error))
    return ByKernels(calibrated_concurrency, record(learned[0], multi), None)


def record(window: Window, learned: PieceCalibration) -> CalibrationRecord:
    """Record of a calibration for the reader. window: the one that it was learned from."""
    names: dict[str, list[float]] = defaultdict(list)
    first = [piece for piece in window.pieces if piece.iteration == window.pieces[0].iteration]
    for (place, _), shift in learned.shifts.items():
        names[first[place].name].append(1e3 * shift.start_ms)
    return CalibrationRecord(
        iterations=learned.iterations,
        num_pieces=learned.num_places,
        num_kernels=learned.num_kernels,
        num_outside=learned.num_outside,
        clock_shift_us=learned.clock_shift_us,
        start_shift_us={name: fmean(values) for name, values in names.items()},
    )
