"""GEMMs from a table of measurements: interpolated between them, outside of them the tile model.

The logarithm of measured / model time is interpolated, which is flat where time is not: the model carries the
size, the neighbours carry what it does not know.

The table is CSV with op,dtype,batch,m,n,k,median_ms.
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

DTYPES = {
    "bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "tf32": "tf32", "float8": "fp8",
    "float8_e4m3fn": "fp8", "float8_e5m2": "fp8",
}  # fmt: skip
GEMM_COLUMNS = ("op", "dtype", "m", "n", "k", "median_ms")
NUM_NEIGHBOURS = 6
LONE_INTERVAL = RatioInterval(low=0.5, high=2.0)
"""Interval around one or two measurements, or outside of all of them."""
QUANTILES = (0.1, 0.9)
GEMM_REACH = math.log(4.0)
"""Distance from which a measured GEMM says nothing: a factor of four in one dimension."""

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
        group = self.groups.get((dtype, layout))
        correction = group.log_ratio(_gemm_point(size)) if group is not None else None
        if correction is None:
            source = "gemm tile, outside the table"
            return estimate(model.time_s, model.bound, source, LONE_INTERVAL, {"inside": 0.0})
        log_ratio, interval = correction
        time_s = model.time_s * math.exp(log_ratio)
        return estimate(time_s, model.bound, "gemm table", interval, {"inside": 1.0})

    def _neighbours(self, rows: list[MeasuredGemm]) -> Neighbours:
        points, ratios = [], []
        for row in rows:
            model = self.model.simulate(row.m, row.n, row.k, row.dtype, row.layout, row.batch)
            points.append(_gemm_point(GemmSize(row.m, row.n, row.k, row.dtype, row.layout, row.batch)))
            ratios.append(math.log(row.time_s / model.time_s))
        return Neighbours(np.array(points), np.array(ratios), GEMM_REACH)


def _gemm_point(size: GemmSize) -> Array:
    return np.log(np.array([size.m, size.n, size.k, size.batch], dtype=np.float64))
