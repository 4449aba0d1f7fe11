"""Attention from measurements: interpolated between them, the tile model with a wide interval outside."""

import math
from collections import defaultdict
from pathlib import Path

import numpy as np

from aorta.errors import ProjectionError
from aorta.hardware import Hardware
from aorta.projection.kernels.estimate import KernelEstimate, estimate
from aorta.projection.kernels.neighbours import LONE_INTERVAL, Neighbours
from aorta.projection.kernels.sdpa.measured import MeasuredSdpa, read_sdpa
from aorta.projection.kernels.sdpa.size import AttentionSize, Family, checked_family
from aorta.projection.kernels.sdpa.tile import TileSdpa

REACH = math.log(8.0)


class TableSdpa:
    """Measured attention of one GPU; path is a CSV file in the form of measured.py."""

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
        group = self.groups.get((family, size.causal, backward))
        alike = size.dtype == "bf16" and size.seq_q == size.seq_kv and size.head_dim_qk == size.head_dim_v
        correction = group.log_ratio(_point(size)) if group and alike else None
        if correction is None:
            return estimate(
                model.time_s, model.bound, "attention tile, outside the table", LONE_INTERVAL, {"inside": 0.0}
            )
        log_ratio, interval = correction
        return estimate(
            model.time_s * math.exp(log_ratio), model.bound, "attention table", interval, {"inside": 1.0}
        )

    def _neighbours(self, rows: list[MeasuredSdpa]) -> Neighbours:
        points, ratios = [], []
        for row in rows:
            model = self.model.simulate(row.size, row.backward, checked_family(row.family))
            points.append(_point(row.size))
            ratios.append(math.log(row.time_s / model.time_s))
        return Neighbours(np.array(points), np.array(ratios), REACH)


def _point(size: AttentionSize) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.log(np.array([size.batch * size.num_heads, size.seq_q, size.head_dim_qk], dtype=np.float64))
