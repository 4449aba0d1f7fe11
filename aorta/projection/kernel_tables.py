"""Kernels from a table of measurements: interpolated between them, outside of them the tile model.

The logarithm of measured / model time is interpolated, which is flat where time is not: the model carries the
size, the neighbours carry what it does not know.

GEMMs are CSV with op,dtype,batch,m,n,k,median_ms; attention is CSV with
backend,batch,heads,kv_heads,seqlen,head_dim,causal,fwd_ms,bwd_ms.
"""

import csv
import math
from collections import defaultdict
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from aorta.errors import ProjectionError
from aorta.hardware import Hardware, RatioInterval
from aorta.projection.estimates import KernelEstimate, estimate
from aorta.projection.gemm import GemmSize, TileGemm
from aorta.projection.sdpa import AttentionSize, Family, TileSdpa, checked_family

DTYPES = {
    "bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "tf32": "tf32", "float8": "fp8",
    "float8_e4m3fn": "fp8", "float8_e5m2": "fp8",
}  # fmt: skip
GEMM_COLUMNS = ("op", "dtype", "m", "n", "k", "median_ms")
SDPA_COLUMNS = ("backend", "batch", "heads", "kv_heads", "seqlen", "head_dim", "causal", "fwd_ms", "bwd_ms")
NUM_NEIGHBOURS = 6
LONE_INTERVAL = RatioInterval(low=0.5, high=2.0)
"""Interval around one or two measurements, or outside of all of them."""
QUANTILES = (0.1, 0.9)
GEMM_REACH = math.log(4.0)
"""Distance from which a measured GEMM says nothing: a factor of four in one dimension."""
SDPA_REACH = math.log(8.0)

Array = NDArray[np.float64]


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


def read_gemms(path: str | Path) -> list[MeasuredGemm]:
    """Reads all rows; the layout is what follows the last underscore of op, as in fwd_TN."""
    try:
        return [gemm_of(row) for row in read_rows(path, GEMM_COLUMNS)]
    except ValueError as error:
        raise ProjectionError(f"{path}: {error}") from None


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


class MeasuredSdpa(msgspec.Struct, frozen=True):
    """A direction of a row of a table of attention; all are bf16."""

    family: str
    batch: int
    heads: int
    kv_heads: int
    seqlen: int
    head_dim: int
    causal: bool
    backward: bool
    time_s: float

    @property
    def size(self) -> AttentionSize:
        """The row's size, in the form that the models take."""
        return AttentionSize(
            batch=self.batch,
            seq_q=self.seqlen,
            seq_kv=self.seqlen,
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            head_dim_qk=self.head_dim,
            head_dim_v=self.head_dim,
            causal=self.causal,
        )


def read_sdpa(path: str | Path) -> list[MeasuredSdpa]:
    """Two entries per row: forward and backward."""
    try:
        return [entry for row in read_rows(path, SDPA_COLUMNS) for entry in sdpa_of(row)]
    except ValueError as error:
        raise ProjectionError(f"{path}: {error}") from None


def sdpa_of(row: dict[str, str]) -> list[MeasuredSdpa]:
    """Reads the forward and the backward pass of a row; ValueError where a number is none."""
    return [
        MeasuredSdpa(
            family=row["backend"],
            batch=int(row["batch"]),
            heads=int(row["heads"]),
            kv_heads=int(row["kv_heads"]),
            seqlen=int(row["seqlen"]),
            head_dim=int(row["head_dim"]),
            causal=row["causal"].lower() in ("true", "1"),
            backward=backward,
            time_s=seconds_of(row["bwd_ms" if backward else "fwd_ms"]),
        )
        for backward in (False, True)
    ]


class Neighbours:
    """log(measured / model) over points of log size. reach: distance at which a point says nothing."""

    def __init__(self, points: Array, log_ratios: Array, reach: float) -> None:
        assert len(points) == len(log_ratios) > 0
        self.points, self.log_ratios, self.reach = points, log_ratios, reach
        self.interval = self._leave_one_out()

    def log_ratio(self, point: Array) -> tuple[float, RatioInterval] | None:
        """Interpolated log(measured / model) and the factors of its range; None outside the measurements."""
        low, high = self.points.min(axis=0), self.points.max(axis=0)
        distance = np.sqrt(((self.points - point) ** 2).sum(axis=1))
        inside = bool(np.all(point >= low - 1e-9) and np.all(point <= high + 1e-9))
        if not inside or distance.min() > self.reach:
            return None
        return self._average(distance), self.interval

    def _average(self, distance: Array) -> float:
        if distance.min() < 1e-9:
            return float(self.log_ratios[distance < 1e-9].mean())
        nearest = np.argsort(distance)[:NUM_NEIGHBOURS]
        weight = distance[nearest] ** -2.0
        return float((weight * self.log_ratios[nearest]).sum() / weight.sum())

    def _leave_one_out(self) -> RatioInterval:
        """Each measurement predicted from the others."""
        if len(self.points) < 3:
            return LONE_INTERVAL
        residuals = []
        for index in range(len(self.points)):
            distance = np.sqrt(((self.points - self.points[index]) ** 2).sum(axis=1))
            distance[index] = np.inf
            residuals.append(self.log_ratios[index] - self._average(distance))
        low, high = np.exp(np.quantile(residuals, QUANTILES))
        return RatioInterval(low=min(1.0, float(low)), high=max(1.0, float(high)))


def _corrected(model: KernelEstimate, group: Neighbours | None, point: Array, kind: str) -> KernelEstimate:
    """The model's time, corrected by measurements around the point; details.inside says if there are any."""
    correction = group.log_ratio(point) if group is not None else None
    if correction is None:
        source = f"{kind} tile, outside the table"
        return estimate(model.time_s, model.bound, source, LONE_INTERVAL, {"inside": 0.0})
    log_ratio, interval = correction
    time_s = model.time_s * math.exp(log_ratio)
    return estimate(time_s, model.bound, f"{kind} table", interval, {"inside": 1.0})


class TableGemm:
    """Measured GEMMs of one GPU; path is a CSV file with op,dtype,batch,m,n,k,median_ms."""

    def __init__(self, hardware: Hardware, path: str | Path) -> None:
        self.path = str(path)
        self.model = TileGemm(hardware, warm=True)
        groups: dict[tuple[str, str], list[MeasuredGemm]] = defaultdict(list)
        for row in read_gemms(path):
            groups[row.dtype, row.layout].append(row)
        if not groups:
            raise ProjectionError(f"{path}: has no measured GEMM")
        self.groups = {key: self._neighbours(rows) for key, rows in groups.items()}

    def simulate(
        self, m: int, n: int, k: int, dtype: str, layout: str = "TN", batch: int = 1
    ) -> KernelEstimate:
        """Seconds. details.inside is 1 where measurements surround the size."""
        size = GemmSize(m, n, k, dtype, layout, batch)
        model = self.model.simulate(m, n, k, dtype, layout, batch)
        return _corrected(model, self.groups.get((dtype, layout)), _gemm_point(size), "gemm")

    def _neighbours(self, rows: list[MeasuredGemm]) -> Neighbours:
        points, ratios = [], []
        for row in rows:
            model = self.model.simulate(row.m, row.n, row.k, row.dtype, row.layout, row.batch)
            points.append(_gemm_point(GemmSize(row.m, row.n, row.k, row.dtype, row.layout, row.batch)))
            ratios.append(math.log(row.time_s / model.time_s))
        return Neighbours(np.array(points), np.array(ratios), GEMM_REACH)


def _gemm_point(size: GemmSize) -> Array:
    return np.log(np.array([size.m, size.n, size.k, size.batch], dtype=np.float64))


class TableSdpa:
    """Measured attention of one GPU; path is a CSV file with the columns of SDPA_COLUMNS."""

    def __init__(self, hardware: Hardware, path: str | Path) -> None:
        self.model = TileSdpa(hardware)
        groups: dict[tuple[str, bool, bool], list[MeasuredSdpa]] = defaultdict(list)
        for row in read_sdpa(path):
            groups[row.family, row.causal, row.backward].append(row)
        if not groups:
            raise ProjectionError(f"{path}: has no measured attention")
        self.groups = {key: self._neighbours(rows) for key, rows in groups.items()}

    def simulate(self, size: AttentionSize, backward: bool, family: Family = "flash") -> KernelEstimate:
        """Seconds. The table is bf16 with equal lengths and head dims; all else is the tile model's."""
        model = self.model.simulate(size, backward, family)
        alike = size.dtype == "bf16" and size.seq_q == size.seq_kv and size.head_dim_qk == size.head_dim_v
        group = self.groups.get((family, size.causal, backward)) if alike else None
        return _corrected(model, group, _sdpa_point(size), "attention")

    def _neighbours(self, rows: list[MeasuredSdpa]) -> Neighbours:
        points, ratios = [], []
        for row in rows:
            model = self.model.simulate(row.size, row.backward, checked_family(row.family))
            points.append(_sdpa_point(row.size))
            ratios.append(math.log(row.time_s / model.time_s))
        return Neighbours(np.array(points), np.array(ratios), SDPA_REACH)


def _sdpa_point(size: AttentionSize) -> Array:
    return np.log(np.array([size.batch * size.num_heads, size.seq_q, size.head_dim_qk], dtype=np.float64))
