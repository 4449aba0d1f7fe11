"""Predicted against measured kernels: GEMMs, attention, collectives, memory. Misses stay in.

Half of the rows of each file, chosen by a hash of the problem's size, was used to fit the constants of
config/hardware/vendor; the other half was not looked at. A transposed twin of a GEMM has the same hash, so
that no size is in both halves.

Measurements came from eager PyTorch calls back to back, so a kernel shorter than the host's time for its
call measures the host: the prediction is the longer of the two, and such rows say "host-bound".
"""

import csv
import re
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from projection.measured_steps import LeftOut

from aorta.errors import AortaError, ProjectionError
from aorta.hardware.part import Hardware, RatioInterval
from aorta.projection.collectives import collective_time, rank_group
from aorta.projection.estimates import KernelEstimate, memory_bound
from aorta.projection.gemm import TileGemm
from aorta.projection.sdpa import AttentionSize, Family, TileSdpa

DTYPES = {
    "bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "tf32": "tf32", "float8": "fp8",
    "float8_e4m3fn": "fp8", "float8_e5m2": "fp8",
}  # fmt: skip
GEMM_COLUMNS = ("op", "dtype", "m", "n", "k", "median_ms")
QUANTILES = (0.1, 0.9)
CALIBRATION, HELD_OUT = "calibration", "held_out"
MIB = 1 << 20
JUDGED_COLLECTIVE_BYTES = MIB
SDPA_COLUMNS = ("backend", "batch", "heads", "kv_heads", "seqlen", "head_dim", "causal", "fwd_ms", "bwd_ms")
CALIBRATED_DTYPE = "bf16"
CALIBRATED_COPY_MIB = 4096
"""memory.csv gave the sustained rate from its largest copy and the host times from its smallest."""
SHEETS = ("gemm.csv", "sdpa.csv", "collectives_x<ranks>.csv", "memory.csv")
SPELLINGS = {
    "allreduce": "all_reduce", "allgather": "all_gather", "reducescatter": "reduce_scatter",
    "alltoall": "all_to_all", "sendrecv": "p2p", "p2p": "p2p", "broadcast": "broadcast",
}  # fmt: skip
COLLECTIVES = re.compile(r"collectives_x([1-9][0-9]{0,3})\.csv")
NUM_CONSTANTS = {"gemm.csv": 7, "sdpa.csv": 4, "collectives_x2.csv": 7, "collectives_x4.csv": 7}
"""Fitted on the calibration half; collectives share theirs."""


class MeasuredGemm(msgspec.Struct, frozen=True):
    """A row of a table of GEMMs."""

    op: str
    layout: str
    dtype: str
    batch: int
    m: int
    n: int
    k: int
    time_s: float


def gemm_of(row: dict[str, str]) -> MeasuredGemm:
    """Reads a row; ValueError where a number is none."""
    return MeasuredGemm(
        op=row["op"],
        layout=row["op"].rpartition("_")[2],
        dtype=DTYPES.get(row["dtype"], row["dtype"]),
        batch=int(row.get("batch") or 1),
        m=int(row["m"]),
        n=int(row["n"]),
        k=int(row["k"]),
        time_s=seconds_of(row["median_ms"]),
    )


def seconds_of(milliseconds: str) -> float:
    """A measured time, above 0."""
    value = float(milliseconds)
    if not 0 < value < float("inf"):
        raise ValueError(f"a time must be above 0, got {milliseconds}")
    return value * 1e-3


def read_rows(path: str | Path, columns: tuple[str, ...]) -> list[dict[str, str]]:
    """The rows of a CSV file that must have these columns."""
    try:
        with open(path, newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            absent = [name for name in columns if name not in (reader.fieldnames or ())]
            if absent:
                raise ProjectionError(f"{path}: lacks the column {absent[0]!r}")
            return [{name: value or "" for name, value in row.items() if name} for row in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ProjectionError(f"{path}: cannot be read: {error}") from None


class KernelCheck(msgspec.Struct, frozen=True, kw_only=True):
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
    """Signed median error: above 0, predictions are too slow."""
    in_interval: float | None
    """Share of the rows measured between low_s and high_s."""


class FileReport(msgspec.Struct, frozen=True, kw_only=True):
    """One file of measurements."""

    median_abs_error_pct: float | None
    """Median absolute error of all judged rows, both halves."""
    p90_abs_error_pct: float | None
    calibration: Accuracy
    held_out: Accuracy
    not_judged: Accuracy
    """Rows that measure something else, each with its note."""
    interval: RatioInterval | None
    """10 % and 90 % quantiles of measured / predicted, calibration rows corrected as if left out."""
    rows: list[KernelCheck]
    left_out: list[LeftOut] = []
    """Lines that cannot be read or modelled, with the reason."""


def sheet_names(folder: Path) -> list[str]:
    """Files of a folder that are sheets of kernels, in a fixed order."""
    file_names = {path.name for path in folder.iterdir() if path.is_file()} if folder.is_dir() else set()
    collectives = sorted((name for name in file_names if COLLECTIVES.fullmatch(name)), key=_rank_count)
    return [name for name in (*SHEETS[:2], *collectives, "memory.csv") if name in file_names]


def _rank_count(name: str) -> int:
    match = COLLECTIVES.fullmatch(name)
    return int(match[1]) if match else 0


def half_of(*size: object) -> str:
    """The half that a problem belongs to."""
    key = " ".join(str(part) for part in size)
    return HELD_OUT if zlib.crc32(key.encode()) & 1 else CALIBRATION


def leave_one_out(log_residuals: Sequence[float], num_constants: int) -> list[float]:
    """Residuals as they would be had each row been left out of a fit of that many constants.

    For a least-squares fit residual / (1 - leverage); the average leverage constants / rows stands for each.
    """
    residual_share = max(1e-9, 1 - num_constants / max(1, len(log_residuals)))
    return [residual / max(residual_share, 0.25) for residual in log_residuals]


class Sheet(NamedTuple):
    """One kind of measurement file, and the way its lines become rows of the report."""

    columns: tuple[str, ...]
    rows_of: Callable[[dict[str, str]], list[KernelCheck]]


def sheet_of(name: str, gpu: Hardware) -> Sheet | None:
    """The sheet for a file's name; None for an unknown name."""
    if name == "gemm.csv":
        return _gemm_sheet(gpu)
    if name == "sdpa.csv":
        return _sdpa_sheet(gpu)
    if name == "memory.csv":
        return Sheet(("op", "mib", "ms"), lambda row: [_memory_row(row, gpu)])
    match = COLLECTIVES.fullmatch(name)
    if match is None:
        return None
    num_ranks = int(match[1])
    return Sheet(("collective", "bytes", "median_ms"), lambda row: [_collective_row(row, num_ranks, gpu)])


def _gemm_sheet(gpu: Hardware) -> Sheet:
    backend = TileGemm(gpu, warm=True)

    def rows_of(line: dict[str, str]) -> list[KernelCheck]:
        row = gemm_of(line)
        half = half_of("x".join(str(dim) for dim in sorted((row.m, row.n, row.k))))
        if row.dtype != CALIBRATED_DTYPE:
            half = HELD_OUT
        predicted = backend.simulate(row.m, row.n, row.k, row.dtype, row.layout, row.batch)
        name = f"{row.op} {row.dtype} {row.batch} x {row.m} x {row.n} x {row.k}"
        return [_row(name, half, row.time_s, predicted, gpu.launch.host_gemm_s)]

    return Sheet(GEMM_COLUMNS, rows_of)


def _sdpa_sheet(gpu: Hardware) -> Sheet:
    backend = TileSdpa(gpu)

    def rows_of(line: dict[str, str]) -> list[KernelCheck]:
        rows = []
        family, causal = checked_family(line["backend"]), line["causal"].lower() in ("true", "1")
        shape = [int(line[name]) for name in ("batch", "heads", "kv_heads", "seqlen", "head_dim")]
        batch, heads, kv_heads, seqlen, head_dim = shape
        size = AttentionSize(batch, seqlen, seqlen, heads, kv_heads, head_dim, head_dim, causal=causal)
        for pass_name, column in (("forward", "fwd_ms"), ("backward", "bwd_ms")):
            predicted = backend.simulate(size, pass_name == "backward", family)
            name = f"{family} {pass_name} {'causal' if causal else 'full'} " + " x ".join(map(str, shape))
            half = half_of("x".join(map(str, shape)))
            rows.append(_row(name, half, seconds_of(line[column]), predicted, 0.0))
        return rows

    return Sheet(SDPA_COLUMNS, rows_of)


def checked_family(family: str) -> Family:
    """The kernel family of a sheet, or an error that names both."""
    if family not in ("flash", "cudnn"):
        raise ProjectionError(f"attention family {family!r} is not one of flash, cudnn")
    return "cudnn" if family == "cudnn" else "flash"


def _collective_row(line: dict[str, str], num_ranks: int, gpu: Hardware) -> KernelCheck:
    written = line["collective"].lower().replace("_", "").replace("-", "")
    op, size = SPELLINGS.get(written, line["collective"]), int(line["bytes"])
    predicted = collective_time(op, size, rank_group(num_ranks, gpu), gpu)
    name, measured_s = f"{op} {size} bytes {num_ranks} ranks", seconds_of(line["median_ms"])
    row = _row(name, half_of(op, size, num_ranks), measured_s, predicted, gpu.launch.host_collective_s)
    if size < JUDGED_COLLECTIVE_BYTES:
        return msgspec.structs.replace(row, judged=False, note="below 1 MiB: the host's time and jitter")
    return row


def _memory_row(line: dict[str, str], gpu: Hardware) -> KernelCheck:
    size = int(line["mib"]) * MIB
    predicted = memory_bound(gpu, size, size)
    fitted = line["op"] == "tiny_launch" or (line["op"] == "copy" and line["mib"] == str(CALIBRATED_COPY_MIB))
    half = CALIBRATION if fitted else HELD_OUT
    row = _row(f"{line['op']} {line['mib']} MiB", half, seconds_of(line["ms"]), predicted, gpu.launch.host_s)
    if 0 < 2 * size <= gpu.memory.l2_bytes:
        return msgspec.structs.replace(
            row, judged=False, note="fits in the L2; the model assumes it does not"
        )
    return row


def file_report(path: Path, gpu: Hardware) -> FileReport:
    """Every line of one file beside its prediction; lines that cannot be read are left out with a reason."""
    sheet = sheet_of(path.name, gpu)
    assert sheet is not None, f"{path.name} is not known"
    rows: list[KernelCheck] = []
    left_out: list[LeftOut] = []
    try:
        lines = read_rows(path, sheet.columns)
    except ProjectionError as error:
        lines = []
        left_out.append(LeftOut(path.name, str(error)))
    for number, line in enumerate(lines, 2):
        try:
            rows += sheet.rows_of(line)
        except (AortaError, ValueError, ArithmeticError) as error:
            left_out.append(LeftOut(f"line {number}", str(error)))
    return _report(path.name, rows, left_out)


def _row(name: str, half: str, measured_s: float, predicted: KernelEstimate, host_s: float) -> KernelCheck:
    host_bound = host_s > predicted.time_s
    predicted_s = max(predicted.time_s, host_s)
    return KernelCheck(
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


def _report(name: str, rows: list[KernelCheck], left_out: list[LeftOut]) -> FileReport:
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
        left_out=left_out,
    )


def residual_interval(rows: Sequence[KernelCheck], num_constants: int) -> RatioInterval | None:
    """The factors around a prediction that hold 80 % of what was measured."""
    if not rows:
        return None
    fitted = [_log_residual(row) for row in rows if row.half == CALIBRATION]
    held_out = [_log_residual(row) for row in rows if row.half == HELD_OUT]
    low, high = np.exp(np.quantile(leave_one_out(fitted, num_constants) + held_out, QUANTILES))
    return RatioInterval(low=min(1.0, float(low)), high=max(1.0, float(high)))


def _log_residual(row: KernelCheck) -> float:
    return float(np.log(row.measured_s / row.predicted_s))


def _accuracy(rows: Sequence[KernelCheck]) -> Accuracy:
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
