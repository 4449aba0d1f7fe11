"""GEMMs from measurements: interpolated between them, the tile model with a wide interval outside."""

import math
from collections import defaultdict
from pathlib import Path

import numpy as np

from aorta.errors import ProjectionError
from aorta.hardware import Hardware
from aorta.projection.kernels.estimate import KernelEstimate, estimate
from aorta.projection.kernels.gemm.measured import MeasuredGemm, read_gemms
from aorta.projection.kernels.gemm.size import GemmSize
from aorta.projection.kernels.gemm.tile import TileGemm
from aorta.projection.kernels.neighbours import LONE_INTERVAL, Neighbours

REACH = math.log(4.0)
"""A neighbour further than a factor of four in one dimension is not near."""


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
        correction = group.log_ratio(_point(size)) if group else None
        if correction is None:
            return estimate(
                model.time_s, model.bound, "gemm tile, outside the table", LONE_INTERVAL, {"inside": 0.0}
            )
        log_ratio, interval = correction
        return estimate(
            model.time_s * math.exp(log_ratio), model.bound, "gemm table", interval, {"inside": 1.0}
        )

    def _neighbours(self, rows: list[MeasuredGemm]) -> Neighbours:
        points, ratios = [], []
        for row in rows:
            model = self.model.simulate(row.m, row.n, row.k, row.dtype, row.layout, row.batch)
            points.append(_point(GemmSize(row.m, row.n, row.k, row.dtype, row.layout, row.batch)))
            ratios.append(math.log(row.time_s / model.time_s))
        return Neighbours(np.array(points), np.array(ratios), REACH)


def _point(size: GemmSize) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.log(np.array([size.m, size.n, size.k, size.batch], dtype=np.float64))
