"""Attention from Origami GEMMs on one compute unit, for comparison with tools that price it so.

A work-group's GEMMs are priced as problems of their own on a device of one compute unit, then multiplied by
the waves of work-groups. Known faults of the method: that one unit is given the whole L2, the scores go to
memory as a GEMM's result would, and the softmax costs nothing. Use the tile backend for a projection.
"""

import math

from aorta.hardware import Hardware
from aorta.projection.kernels.estimate import KernelEstimate, estimate
from aorta.projection.kernels.gemm.origami import INTERVAL, OrigamiGemm
from aorta.projection.kernels.gemm.size import GemmSize
from aorta.projection.kernels.sdpa.size import AttentionSize, Family, checked_family

ROWS_OF_WORK_GROUP = 256


class OrigamiSdpa:
    """The method for one AMD GPU."""

    def __init__(self, hardware: Hardware) -> None:
        self.hardware = hardware
        self.gemm = OrigamiGemm(hardware)
        self.one_unit = self.gemm.device_of(1)

    def simulate(self, size: AttentionSize, backward: bool, family: Family = "flash") -> KernelEstimate:
        """Seconds at the sustained clock; the family changes nothing here."""
        checked_family(family)
        stationary, walked = (size.seq_kv, size.seq_q) if backward else (size.seq_q, size.seq_kv)
        groups = math.ceil(stationary / ROWS_OF_WORK_GROUP) * size.batch * size.num_heads
        waves = math.ceil(groups / self.hardware.compute.num_cus)
        share = size.scores / (float(size.seq_q) * size.seq_kv * size.batch * size.num_heads)
        cycles = sum(self._cycles(m, n, k, size.dtype) for m, n, k in _gemms(size, walked, backward)) * share
        launch_s = self.hardware.launch.kernel_s
        return estimate(
            waves * cycles / self.hardware.compute.sustained_clock_hz + launch_s,
            "compute",
            "attention origami, one unit",
            INTERVAL,
            {"waves": float(waves), "cycles": cycles, "launch_s": launch_s},
        )

    def _cycles(self, m: int, n: int, k: int, dtype: str) -> float:
        return self.gemm.cycles(GemmSize(m, n, k, dtype), self.one_unit)[0]


def _gemms(size: AttentionSize, walked: int, backward: bool) -> list[tuple[int, int, int]]:
    """Shapes of one work-group: QK^T and PV, or QK^T, dP, dV, dK and dQ."""
    rows, qk, v = ROWS_OF_WORK_GROUP, size.head_dim_qk, size.head_dim_v
    if not backward:
        return [(rows, walked, qk), (rows, v, walked)]
    return [(rows, walked, qk), (rows, walked, v), (rows, v, walked), (rows, qk, walked), (walked, qk, rows)]
