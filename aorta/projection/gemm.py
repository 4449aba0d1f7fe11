"""Time of a GEMM: its size, and output tiles in waves.

A GEMM is D[m, n] = A[m, k] . B[k, n], batch of them at once. Layout is as in cuBLAS after the column-major
turn: TN is x[m, k] . w[n, k]^T (forward), NN is dgrad, NT is wgrad.

The tile model works out three times for every tile shape and split of K, and takes the fastest candidate, as
a library's heuristic would:

- the schedule: waves of tiles, each running its K loop at the boost clock, as fast as the matrix units, the
  shared memory and the L2 feed it, plus filling the pipeline and writing the result;
- power: a chip that is busy everywhere does not hold its boost clock. All arithmetic, padding included,
  runs at no more than a rate chosen so that a large GEMM ends at the sustained rate of the hardware file.
  This is why wave quantisation costs less than the tile count says: idle units let the others clock higher;
- HBM: operands and result, operands again where they outgrow the L2.

Idea of tiles, waves and quantisation: NVIDIA, Matrix Multiplication Background User's Guide (2023).
"""

import math
from typing import NamedTuple

import msgspec
import numpy as np

from aorta.errors import ProjectionError
from aorta.hardware.part import (
    Hardware,
    RatioInterval,
    boost_flops,
    dtype_bytes,
    rate_interval,
    sustained_flops,
)
from aorta.projection.estimates import KernelEstimate, estimate
from aorta.timeline.arrays import Floats

LAYOUTS = ("TN", "NN", "NT")
TILE_SHAPES = (
    (256, 256), (256, 192), (192, 256), (128, 256), (256, 128), (128, 192), (192, 128),
    (128, 128), (64, 256), (256, 64), (128, 64), (64, 128), (64, 64),
)  # fmt: skip
SPLITS_OF_K = (1, 2, 4, 8, 16)
K_STEP_BYTES = 128
"""Bytes of a row of an operand tile that one step of the K loop loads."""
RESULT_BYTES_PER_PART = 8.0
"""A split of K writes each fp32 partial result and reads it again."""
UNALIGNED_HIGH = 3.0
"""Libraries load rows that do not begin at 16 bytes without their bulk copies; no such size was measured, so
the range says that it may take longer, and the time does not."""


class GemmSize(msgspec.Struct, frozen=True):
    """A checked problem."""

    m: int
    n: int
    k: int
    dtype: str
    layout: str = "TN"
    batch: int = 1

    def __post_init__(self) -> None:
        for name in ("m", "n", "k", "batch"):
            if getattr(self, name) < 1:
                raise ProjectionError(f"a GEMM needs {name} of at least 1, got {getattr(self, name)}")
        if self.layout not in LAYOUTS:
            raise ProjectionError(f"layout {self.layout!r} is not one of {', '.join(LAYOUTS)}")
        dtype_bytes(self.dtype)

    @property
    def bytes_read(self) -> float:
        """A and B once."""
        return dtype_bytes(self.dtype) * self.batch * (self.m * self.k + self.k * self.n)

    @property
    def bytes_written(self) -> float:
        """D once. FP8 and FP4 GEMMs write bf16."""
        return max(2.0, dtype_bytes(self.dtype)) * self.batch * self.m * self.n


class Candidates(NamedTuple):
    """Times of candidate kernels, one entry per tile shape."""

    math_s: Floats
    feed_s: Floats
    fill_s: Floats
    schedule_s: Floats
    power_s: Floats
    memory_s: Floats
    total_s: Floats


class TileGemm:
    """The model for one GPU. warm: operands that fit are in the L2 already, as in a repeated benchmark."""

    def __init__(self, hardware: Hardware, warm: bool = False) -> None:
        self.hardware = hardware
        self.warm = warm
        fits = [
            shape for shape in TILE_SHAPES if 4 * shape[0] * shape[1] <= hardware.compute.register_bytes / 2
        ]
        table = np.array([(m, n, split) for m, n in fits for split in SPLITS_OF_K], dtype=np.float64)
        self.tile_m, self.tile_n, self.split = table[:, 0], table[:, 1], table[:, 2]
        self._estimates: dict[GemmSize, KernelEstimate] = {}

    def simulate(
        self, m: int, n: int, k: int, dtype: str, layout: str = "TN", batch: int = 1
    ) -> KernelEstimate:
        """Seconds of the kernel on the GPU, launch included; the host's time is not in it."""
        size = GemmSize(m, n, k, dtype, layout, batch)
        if size in self._estimates:
            return self._estimates[size]
        limit = power_flops(self.hardware, dtype)
        sureness = rate_interval(self.hardware, dtype, self.hardware.efficiency.gemm.interval)
        tried = self._candidates(size, limit, self._memory_s(size, size.bytes_read, size.bytes_written))
        best = int(np.argmin(tried.total_s))
        launch_s = self.hardware.launch.kernel_s
        if _unaligned(size):
            sureness = RatioInterval(low=sureness.low, high=sureness.high * UNALIGNED_HIGH)
        self._estimates[size] = estimate(
            float(tried.total_s[best]) + launch_s,
            _bound(tried, best, launch_s),
            "gemm tile",
            sureness,
        )
        return self._estimates[size]

    def _candidates(self, size: GemmSize, power_limit: float, memory_s: Floats) -> Candidates:
        compute, fitted = self.hardware.compute, self.hardware.efficiency.gemm
        element = dtype_bytes(size.dtype)
        step = K_STEP_BYTES / element
        k_part = np.ceil(size.k / self.split / step) * step
        rows, columns = np.ceil(size.m / self.tile_m), np.ceil(size.n / self.tile_n)
        tiles = size.batch * rows * columns * self.split
        waves = np.ceil(tiles / compute.num_cus)
        busy = np.minimum(tiles, compute.num_cus)

        boost = boost_flops(self.hardware, size.dtype) * fitted.issue
        math_s = 2 * self.tile_m * self.tile_n * k_part / (boost / compute.num_cus)
        feed_s = np.maximum(self._lds_s(k_part * element), self._l2_s(k_part * element, busy))
        schedule_s = waves * (np.maximum(math_s, feed_s) + fitted.fill_s)
        padded = 2 * size.batch * rows * self.tile_m * columns * self.tile_n * size.k
        power_s = padded / power_limit
        work_s = (schedule_s**fitted.power_knee + power_s**fitted.power_knee) ** (1 / fitted.power_knee)
        total_s = np.maximum(work_s, memory_s) + fitted.unhidden * np.minimum(work_s, memory_s)
        total_s = total_s + np.where(self.split > 1, self.hardware.launch.kernel_s, 0.0)
        fill_s = np.full_like(math_s, fitted.fill_s)
        return Candidates(math_s, feed_s, fill_s, schedule_s, power_s, memory_s, total_s)

    def _lds_s(self, row_bytes: Floats) -> Floats:
        """Shared memory of one compute unit handing the operands to its matrix units."""
        readers_of_b = np.maximum(1.0, self.tile_m / self.hardware.compute.lds_rows)
        compute = self.hardware.compute
        rate = compute.lds_bytes_per_cu_clock * compute.boost_clock_hz
        return (self.tile_m + self.tile_n * readers_of_b) * row_bytes / rate

    def _l2_s(self, row_bytes: Floats, busy: Floats) -> Floats:
        """Operands of one tile from the L2, which all busy compute units share."""
        memory = self.hardware.memory
        shared = memory.l2_bytes_per_s * self.hardware.efficiency.gemm.l2
        bytes_of_tile = (self.tile_m + self.tile_n) * row_bytes / memory.l2_readers
        # One compute unit alone draws no more than twice its share.
        return bytes_of_tile / np.minimum(
            shared / busy, 2 * memory.l2_bytes_per_s / self.hardware.compute.num_cus
        )

    def _memory_s(self, size: GemmSize, once: float, written: float) -> Floats:
        """HBM traffic: operands once, and again for each further wave that cannot share them.

        A wave covers about a square of tiles, or a strip where the result is narrower, so A is read once
        per strip of columns and B once per strip of rows; half of that is still in the L2 from the wave
        before. Nothing is read twice that fits.
        """
        memory, num_cus = self.hardware.memory, self.hardware.compute.num_cus
        element = dtype_bytes(size.dtype)
        fits = once + written <= memory.l2_bytes
        area = num_cus * self.tile_m * self.tile_n
        side = np.sqrt(area)
        reads_of_a = np.maximum(1.0, size.n * np.minimum(size.m, side) / area)
        reads_of_b = np.maximum(1.0, size.m * np.minimum(size.n, side) / area)
        again = size.m * (reads_of_a - 1) + size.n * (reads_of_b - 1)
        again = 0.5 * again * size.k * element * size.batch if once > memory.l2_bytes else 0.0 * again
        reads = once + again
        if fits and self.warm:
            reads = np.zeros_like(reads)
        parts = np.where(
            self.split > 1, RESULT_BYTES_PER_PART * self.split * size.batch * size.m * size.n, 0.0
        )
        # Partial results that fit stay in the L2.
        parts = np.where(parts <= memory.l2_bytes, parts / 2, parts)
        rate = memory.sustained_hbm_bytes_per_s * self.hardware.efficiency.gemm.hbm
        memory_s: Floats = (reads + written + parts) / rate
        return memory_s


def _unaligned(size: GemmSize) -> bool:
    """True if rows of an operand or of the result do not begin at multiples of 16 bytes."""
    operands = {"TN": (size.k,), "NN": (size.k, size.n), "NT": (size.m, size.n)}[size.layout]
    element = dtype_bytes(size.dtype)
    return any(dim * element % 16 for dim in operands) or size.n * max(2.0, element) % 16 != 0


def power_flops(hardware: Hardware, dtype: str) -> float:
    """The rate limit that makes the largest GEMMs end at the sustained rate.

    The schedule at the boost clock and this limit are joined by a power mean; this solves it for the limit.
    """
    fitted = hardware.efficiency.gemm
    boost = boost_flops(hardware, dtype) * fitted.issue
    sustained = sustained_flops(hardware, dtype)
    if sustained >= 0.999 * boost:  # power is no limit here
        return math.inf
    return float((sustained**-fitted.power_knee - boost**-fitted.power_knee) ** (-1 / fitted.power_knee))


def _bound(tried: Candidates, best: int, launch_s: float) -> str:
    work_s = max(tried.schedule_s[best], tried.power_s[best])
    if launch_s > max(work_s, tried.memory_s[best]):
        return "latency"
    if tried.memory_s[best] > work_s:
        return "memory"
    if tried.power_s[best] >= tried.schedule_s[best]:
        return "compute"
    loop_s = max(tried.math_s[best], tried.feed_s[best])
    if tried.fill_s[best] > loop_s:
        return "latency"
    return "compute" if tried.math_s[best] >= tried.feed_s[best] else "lds"
