"""Attention from measurements: interpolated between them, the tile model with a wide interval outside."""

import math
from collections import defaultdict
from pathlib import Path

import numpy as np

from aorta.errors import ProjectionError
from aorta.projection.estimate import Estimate, estimate
from aorta.projection.gemm.neighbours import LONE_INTERVAL, Neighbours
from aorta.projection.hardware import Hardware
from aorta.projection.sdpa.backend import Family
from aorta.projection.sdpa.measured import MeasuredSdpa, read_sdpa
from aorta.projection.sdpa.tile import TileSdpa

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

    def simulate(
        self,
        batch: int,
        seq_q: int,
        seq_kv: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_v: int,
        dtype: str,
        causal: bool,
        backward: bool,
        family: Family = "flash",
    ) -> Estimate:
        """Seconds. The table is bf16 with equal lengths and head dims; all else is the tile model's."""
        model = self.model.simulate(
            batch,
            seq_q,
            seq_kv,
            num_heads,
            num_kv_heads,
            head_dim_qk,
            head_dim_v,
            dtype,
            causal,
            backward,
            family,
        )
        group = self.groups.get((family, causal, backward))
        alike = dtype == "bf16" and seq_q == seq_kv and head_dim_qk == head_dim_v
        found = group.log_ratio(_point(batch * num_heads, seq_q, head_dim_qk)) if group and alike else None
        if found is None:
            return estimate(
                model.time_s, model.bound, "attention tile, outside the table", LONE_INTERVAL, {"inside": 0.0}
            )
        log_ratio, interval = found
        return estimate(
            model.time_s * math.exp(log_ratio), model.bound, "attention table", interval, {"inside": 1.0}
        )

    def _neighbours(self, rows: list[MeasuredSdpa]) -> Neighbours:
        points, ratios = [], []
        for row in rows:
            heads, length, dim = row.heads, row.seqlen, row.head_dim
            model = self.model.simulate(
                row.batch, length, length, heads, row.kv_heads, dim, dim, "bf16", row.causal, row.backward,
                "cudnn" if row.family == "cudnn" else "flash",
            )  # fmt: skip
            points.append(_point(row.batch * heads, length, dim))
            ratios.append(math.log(row.time_s / model.time_s))
        return Neighbours(np.array(points), np.array(ratios), REACH)


def _point(heads: int, length: int, dim: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.log(np.array([heads, length, dim], dtype=np.float64))
