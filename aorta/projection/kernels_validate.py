"""Predicted against measured kernels: GEMMs, attention, collectives, memory. Misses stay in.

Half of the rows of each file, chosen by a hash of the problem's size, was used to fit the constants of
config/hardware/vendor; the other half was not looked at. A transposed twin of a GEMM has the same hash, so
that no size is in both halves.

Measurements came from eager PyTorch calls back to back, so a kernel shorter than the host's time for its
call measures the host: the prediction is the longer of the two, and such rows say "host-bound".
"""

import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np

from aorta.errors import ProjectionError
from aorta.projection.collectives import RankGroup, collective_time
from aorta.projection.estimate import Estimate, Interval
from aorta.projection.gemm import get_gemm_simulation_backend
from aorta.projection.gemm.measured import read_gemms, read_rows
from aorta.projection.gemm.neighbours import QUANTILES
from aorta.projection.hardware import Hardware, load_hardware, memory_bound
from aorta.projection.sdpa import get_sdpa_simulation_backend
from aorta.projection.sdpa.measured import read_sdpa

HALF_RULE = "crc32 of the problem's size: even rows calibrate, odd rows are held out"
CALIBRATION, HELD_OUT = "calibration", "held_out"
MIB = 1 << 20
JUDGED_COLLECTIVE_BYTES = MIB
CALIBRATED_DTYPE = "bf16"
CALIBRATED_COPY_MIB = 4096
"""memory.csv gave the sustained rate from its largest copy and the host times from its smallest."""
NUM_CONSTANTS = {"gemm.csv": 7, "sdpa.csv": 4, "collectives_x2.csv": 7, "collectives_x4.csv": 7}
"""Fitted on the calibration half; collectives share theirs."""


class KernelRow(msgspec.Struct, frozen=True, kw_only=True):
    """One measured row beside its prediction."""

    name: str
    half: str
    measured_s: float
    predicted_s: float
    low_s: float
    high_s: float
    bound: str
    error_pct: float
    """(predicted - measured) / measured."""
    judged: bool = True
    note: str = ""


class Accuracy(msgspec.Struct, frozen=True, kw_only=True):
    """Errors of a set of rows; None where it is empty."""

    num_rows: int
    median_abs_error_pct: float | None
    p90_abs_error_pct: float | None
    median_error_pct: float | None
    """With its sign: above 0 predicts too slow."""
    in_interval: float | None
    """Share of the rows measured between low_s and high_s."""


class FileReport(msgspec.Struct, frozen=True, kw_only=True):
    """One file of measurements."""

    median_abs_error_pct: float | None
    """Of all judged rows, both halves."""
    p90_abs_error_pct: float | None
    calibration: Accuracy
    held_out: Accuracy
    not_judged: Accuracy
    """Rows that measure something else, each with its note."""
    interval: Interval | None
    """10 % and 90 % quantiles of measured / predicted, calibration rows corrected as if left out."""
    rows: list[KernelRow]


class KernelReport(msgspec.Struct, frozen=True, kw_only=True):
    """All files found."""

    hardware: str
    half_rule: str
    files: dict[str, FileReport]


def validate_kernels(data_dir: str | Path, hardware: Hardware | str = "h200") -> KernelReport:
    """Reads whichever of the files data_dir (or its folder named after the GPU) has."""
    gpu = load_hardware(hardware) if isinstance(hardware, str) else hardware
    folder = Path(data_dir)
    if (folder / gpu.name).is_dir():
        folder = folder / gpu.name
    files = {
        name: _report(name, rows_of(folder / name, gpu))
        for name, rows_of in READERS.items()
        if (folder / name).is_file()
    }
    if not files:
        raise ProjectionError(f"{folder}: has none of {', '.join(READERS)}")
    return KernelReport(hardware=gpu.name, half_rule=HALF_RULE, files=files)


def half_of(*size: object) -> str:
    """Which half a problem belongs to."""
    key = " ".join(str(part) for part in size)
    return HELD_OUT if zlib.crc32(key.encode()) & 1 else CALIBRATION


def leave_one_out(log_residuals: Sequence[float], num_constants: int) -> list[float]:
    """Residuals as they would be had each row been left out of a fit of that many constants.

    For a least-squares fit residual / (1 - leverage); the average leverage constants / rows stands for each.
    """
    kept = max(1e-9, 1 - num_constants / max(1, len(log_residuals)))
    return [residual / max(kept, 0.25) for residual in log_residuals]


def _gemm_rows(path: Path, gpu: Hardware) -> list[KernelRow]:
    backend = get_gemm_simulation_backend("tile", gpu, warm=True)
    rows = []
    for row in read_gemms(path):
        half = half_of("x".join(str(dim) for dim in sorted((row.m, row.n, row.k))))
        if row.dtype != CALIBRATED_DTYPE:
            half = HELD_OUT
        predicted = backend.simulate(row.m, row.n, row.k, row.dtype, row.layout, row.batch)
        name = f"{row.op} {row.dtype} {row.batch} x {row.m} x {row.n} x {row.k}"
        rows.append(_row(name, half, row.time_s, predicted, gpu.launch.host_gemm_s))
    return rows


def _sdpa_rows(path: Path, gpu: Hardware) -> list[KernelRow]:
    backend = get_sdpa_simulation_backend("tile", gpu)
    rows = []
    for row in read_sdpa(path):
        shape = (row.batch, row.heads, row.kv_heads, row.seqlen, row.head_dim)
        predicted = backend.simulate(
            row.batch, row.seqlen, row.seqlen, row.heads, row.kv_heads, row.head_dim, row.head_dim, "bf16",
            row.causal, row.backward, "cudnn" if row.family == "cudnn" else "flash",
        )  # fmt: skip
        name = (
            f"{row.family} {'backward' if row.backward else 'forward'} {'causal' if row.causal else 'full'} "
            + " x ".join(str(part) for part in shape)
        )
        rows.append(_row(name, half_of("x".join(map(str, shape))), row.time_s, predicted, 0.0))
    return rows


def _collective_rows(num_ranks: int) -> Callable[[Path, Hardware], list[KernelRow]]:
    def rows_of(path: Path, gpu: Hardware) -> list[KernelRow]:
        rows = []
        for row in read_rows(path, ("collective", "bytes", "median_ms")):
            op, size = row["collective"], int(row["bytes"])
            predicted = collective_time(op, size, RankGroup(num_ranks, num_ranks), gpu)
            name, measured_s = f"{op} {size} bytes {num_ranks} ranks", float(row["median_ms"]) * 1e-3
            made = _row(
                name, half_of(op, size, num_ranks), measured_s, predicted, gpu.launch.host_collective_s
            )
            if size < JUDGED_COLLECTIVE_BYTES:
                made = msgspec.structs.replace(
                    made, judged=False, note="below 1 MiB: the host's time and jitter"
                )
            rows.append(made)
        return rows

    return rows_of


def _memory_rows(path: Path, gpu: Hardware) -> list[KernelRow]:
    rows = []
    for row in read_rows(path, ("op", "mib", "ms")):
        size = int(row["mib"]) * MIB
        predicted = memory_bound(gpu, size, size)
        fitted = row["op"] == "tiny_launch" or (
            row["op"] == "copy" and row["mib"] == str(CALIBRATED_COPY_MIB)
        )
        name = f"{row['op']} {row['mib']} MiB"
        half = CALIBRATION if fitted else HELD_OUT
        made = _row(name, half, float(row["ms"]) * 1e-3, predicted, gpu.launch.host_s)
        if 0 < 2 * size <= gpu.memory.l2_bytes:
            made = msgspec.structs.replace(
                made, judged=False, note="fits in the L2; the model assumes it does not"
            )
        rows.append(made)
    return rows


READERS: dict[str, Callable[[Path, Hardware], list[KernelRow]]] = {
    "gemm.csv": _gemm_rows,
    "sdpa.csv": _sdpa_rows,
    "collectives_x2.csv": _collective_rows(2),
    "collectives_x4.csv": _collective_rows(4),
    "memory.csv": _memory_rows,
}


def _row(name: str, half: str, measured_s: float, predicted: Estimate, host_s: float) -> KernelRow:
    host_bound = host_s > predicted.time_s
    predicted_s = max(predicted.time_s, host_s)
    return KernelRow(
        name=name,
        half=half,
        measured_s=measured_s,
        predicted_s=predicted_s,
        low_s=predicted_s * predicted.low_s / predicted.time_s,
        high_s=predicted_s * predicted.high_s / predicted.time_s,
        bound="host" if host_bound else predicted.bound,
        error_pct=100 * (predicted_s / measured_s - 1),
        note="host-bound" if host_bound else "",
    )


def _report(name: str, rows: list[KernelRow]) -> FileReport:
    judged = [row for row in rows if row.judged]
    all_rows = _accuracy(judged)
    return FileReport(
        median_abs_error_pct=all_rows.median_abs_error_pct,
        p90_abs_error_pct=all_rows.p90_abs_error_pct,
        calibration=_accuracy([row for row in judged if row.half == CALIBRATION]),
        held_out=_accuracy([row for row in judged if row.half == HELD_OUT]),
        not_judged=_accuracy([row for row in rows if not row.judged]),
        interval=residual_interval(judged, NUM_CONSTANTS.get(name, 1)),
        rows=rows,
    )


def residual_interval(rows: Sequence[KernelRow], num_constants: int) -> Interval | None:
    """The factors around a prediction that hold 80 % of what was measured."""
    if not rows:
        return None
    fitted = [_log_residual(row) for row in rows if row.half == CALIBRATION]
    other = [_log_residual(row) for row in rows if row.half == HELD_OUT]
    low, high = np.exp(np.quantile(leave_one_out(fitted, num_constants) + other, QUANTILES))
    return Interval(low=min(1.0, float(low)), high=max(1.0, float(high)))


def _log_residual(row: KernelRow) -> float:
    return float(np.log(row.measured_s / row.predicted_s))


def _accuracy(rows: Sequence[KernelRow]) -> Accuracy:
    if not rows:
        return Accuracy(
            num_rows=0,
            median_abs_error_pct=None,
            p90_abs_error_pct=None,
            median_error_pct=None,
            in_interval=None,
        )
    errors = np.array([row.error_pct for row in rows])
    return Accuracy(
        num_rows=len(rows),
        median_abs_error_pct=float(np.median(np.abs(errors))),
        p90_abs_error_pct=float(np.quantile(np.abs(errors), 0.9)),
        median_error_pct=float(np.median(errors)),
        in_interval=float(np.mean([row.low_s <= row.measured_s <= row.high_s for row in rows])),
    )
