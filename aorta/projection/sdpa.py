"""Time of an attention: its size, and flash attention as tiles on compute units.

A forward tile holds a block of queries and walks over the keys that its queries see; each step is QK^T, the
softmax and PV. A backward tile holds a block of keys and walks over the queries that see them; each step is
QK^T again, dP = dO V^T, dV, dK and dQ, and adds its part of dQ in fp32 to L2, where other tiles add theirs.

The steps of one tile take what the matrix units, the exponentials, the shared memory or the L2 need. Kernels
run part of the softmax beside the matrix units, the rest adds to their time; so small heads, which have as
many scores and fewer products, lose rate.
Equal tiles run in waves. Causal tiles differ, so compute units do not finish together: half of the longest
tile is idle time at the end. A chip that is busy everywhere is held by the power limit of the GEMM model.

Sources of the algorithm: Dao, FlashAttention-2 (arXiv 2307.08691); Shah et al., FlashAttention-3
(arXiv 2407.08608).
"""

import math
from typing import Literal, NamedTuple

import msgspec
import numpy as np

from aorta.errors import ProjectionError
from aorta.hardware.part import Hardware, SdpaEfficiency, boost_flops, dtype_bytes, rate_interval
from aorta.projection.estimates import KernelEstimate, estimate
from aorta.projection.gemm import power_flops
from aorta.timeline.arrays import Floats

Family = Literal["flash", "cudnn"]
IDLE_SHARE_OF_LONGEST = 0.5
BACKWARD_KERNELS = 3
"""Row sums of dO o O, the main kernel, the conversion of dQ."""


class Block(NamedTuple):
    """Shape of one kernel family: rows that a tile holds, rows of one step, tiles at once on one unit."""

    tile_rows: int
    step: int
    per_cu: int


FORWARD = {"flash": Block(128, 64, 2), "cudnn": Block(128, 128, 1)}
BACKWARD = {"flash": Block(128, 64, 1), "cudnn": Block(128, 64, 1)}


class AttentionSize(msgspec.Struct, frozen=True):
    """A checked problem. causal aligns the last query with the last key."""

    batch: int
    seq_q: int
    seq_kv: int
    num_heads: int
    num_kv_heads: int
    head_dim_qk: int
    head_dim_v: int
    dtype: str = "bf16"
    causal: bool = True
    window: int | None = None
    """Keys that each query sees at most, under the causal mask."""

    def __post_init__(self) -> None:
        for name in ("batch", "seq_q", "seq_kv", "num_heads", "num_kv_heads", "head_dim_qk", "head_dim_v"):
            if getattr(self, name) < 1:
                raise ProjectionError(f"attention needs {name} of at least 1, got {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise ProjectionError(
                f"num_kv_heads = {self.num_kv_heads} must divide num_heads = {self.num_heads}"
            )
        if self.causal and self.seq_kv < self.seq_q:
            raise ProjectionError(
                f"causal attention needs seq_kv of at least seq_q = {self.seq_q}, got {self.seq_kv}"
            )
        dtype_bytes(self.dtype)

    @property
    def scores(self) -> float:
        """Query-key pairs that count, over batch and heads."""
        pairs = float(self.seq_q) * self.seq_kv
        if self.causal:
            pairs -= self.seq_q * (self.seq_q - 1) / 2.0
        if self.window is not None and self.causal and self.window < self.seq_kv:
            first = min(self.window, self.seq_q) if self.seq_kv == self.seq_q else 0
            pairs = float(self.seq_q) * self.window - first * (first - 1) / 2.0
        return pairs * self.batch * self.num_heads

    def bytes_moved(self, backward: bool) -> float:
        """Q, K, V, O once; backward also dO, dQ, dK, dV and dQ in fp32 twice (sum, then convert)."""
        q = self.batch * self.num_heads * self.seq_q
        kv = self.batch * self.num_kv_heads * self.seq_kv
        tensors = (q + kv) * float(self.head_dim_qk + self.head_dim_v)
        size = dtype_bytes(self.dtype)
        if not backward:
            return tensors * size + q * 4.0
        return 2 * tensors * size + q * self.head_dim_v * size + q * self.head_dim_qk * 8.0 + q * 12.0


class TileSdpa:
    """The model for one GPU."""

    def __init__(self, hardware: Hardware) -> None:
        self.hardware = hardware
        self._estimates: dict[tuple[AttentionSize, bool, str], KernelEstimate] = {}

    def simulate(self, size: AttentionSize, backward: bool, family: Family = "flash") -> KernelEstimate:
        """Seconds of all kernels of one pass, launches included."""
        key = (size, backward, family)
        if key in self._estimates:
            return self._estimates[key]
        inside = size.bytes_moved(backward=False) * (2.0 if backward else 1.0)
        hardware = self.hardware
        fitted = hardware.efficiency.sdpa(family)
        block = (BACKWARD if backward else FORWARD)[family]
        steps = _steps_backward(size, block) if backward else _steps_forward(size, block)
        step_s, limit = self._step_s(size, backward, fitted, block)
        schedule_s = self._schedule_s(size, steps, step_s, block)

        executed = float(steps.sum()) * size.batch * size.num_heads * _step_flops(size, backward, block)
        power_s = executed / power_flops(hardware, size.dtype)
        knee = hardware.efficiency.gemm.power_knee
        work_s: float = (schedule_s**knee + power_s**knee) ** (1 / knee)
        rate = hardware.memory.sustained_hbm_bytes_per_s * hardware.efficiency.gemm.hbm
        memory_s = inside / rate
        beside_s = (size.bytes_moved(backward=True) - inside) / rate if backward else 0.0
        launch_s = hardware.launch.kernel_s * (BACKWARD_KERNELS if backward else 1)
        bound = "memory" if memory_s > work_s else "compute" if power_s > schedule_s else limit
        self._estimates[key] = estimate(
            max(work_s, memory_s) + beside_s + launch_s,
            bound,
            f"attention tile, {family}",
            rate_interval(hardware, size.dtype, fitted.interval),
        )
        return self._estimates[key]

    def _step_s(
        self, size: AttentionSize, backward: bool, fitted: SdpaEfficiency, block: Block
    ) -> tuple[float, str]:
        """Seconds of a step of a tile that has a compute unit to itself, and what bounds it."""
        compute, memory = self.hardware.compute, self.hardware.memory
        share = fitted.backward if backward else fitted.forward
        at_boost_s = (
            _step_flops(size, backward, block) * compute.num_cus / boost_flops(self.hardware, size.dtype)
        )
        clock = compute.boost_clock_hz
        exp_s = block.tile_rows * block.step / (compute.exp_per_cu_clock * clock)
        readers = max(1.0, block.tile_rows / compute.lds_rows)
        rows = block.step * (size.head_dim_qk + size.head_dim_v) * dtype_bytes(size.dtype)
        lds_s = rows * readers * (2.5 if backward else 1.0) / (compute.lds_bytes_per_cu_clock * clock)
        l2_rate = memory.l2_bytes_per_s * self.hardware.efficiency.gemm.l2 / compute.num_cus
        l2_bytes = rows + (block.step * size.head_dim_qk * 4.0 if backward else 0.0)  # dQ is added in fp32
        l2_s = l2_bytes / l2_rate
        # The share is of products without their exponentials, and was fitted where both take long. Where
        # matrix units are slow beside the exponentials (H20) the sum would beat the units' boost clock.
        exp_share = fitted.softmax_backward if backward else fitted.softmax_forward
        math_s = max(at_boost_s, at_boost_s / share + exp_s * exp_share)
        times = {"compute": math_s, "exp": exp_s, "lds": max(lds_s, l2_s)}
        limit = max(times, key=lambda name: times[name])
        return times[limit], limit

    def _schedule_s(self, size: AttentionSize, steps: Floats, step_s: float, block: Block) -> float:
        """Time until the last tile ends. steps has one entry per tile of one head."""
        copies = size.batch * size.num_heads
        tiles = len(steps) * copies
        num_cus = self.hardware.compute.num_cus
        slots = num_cus * min(block.per_cu, max(1, math.ceil(tiles / num_cus)))
        slowdown = slots / num_cus  # tiles on one unit share it
        fill_s = self.hardware.efficiency.gemm.fill_s
        longest_s = float(steps.max()) * step_s * slowdown + fill_s
        equal_s = math.ceil(tiles / slots) * longest_s
        total_s = (float(steps.sum()) * step_s * slowdown + len(steps) * fill_s) * copies
        spread_s = max(longest_s, total_s / slots + IDLE_SHARE_OF_LONGEST * longest_s)
        return min(equal_s, spread_s) if size.causal else equal_s


def _steps_forward(size: AttentionSize, block: Block) -> Floats:
    """Key steps of each query tile of one head."""
    ends = np.minimum(np.arange(1, math.ceil(size.seq_q / block.tile_rows) + 1) * block.tile_rows, size.seq_q)
    visible_keys = ends + (size.seq_kv - size.seq_q) if size.causal else np.full_like(ends, size.seq_kv)
    if size.window is not None and size.causal:
        visible_keys = np.minimum(
            visible_keys, size.window + block.tile_rows
        )  # the window of the first to that of the last query
    return np.ceil(visible_keys / block.step)


def _steps_backward(size: AttentionSize, block: Block) -> Floats:
    """Query steps of each key tile of one head. Keys that only late queries see have fewer."""
    starts = np.arange(math.ceil(size.seq_kv / block.tile_rows)) * block.tile_rows
    first = np.maximum(0, starts - (size.seq_kv - size.seq_q)) if size.causal else np.zeros_like(starts)
    steps: Floats = np.maximum(1.0, np.ceil(size.seq_q / block.step) - np.floor(first / block.step))
    if size.window is not None and size.causal:
        steps = np.minimum(steps, math.ceil((size.window + block.tile_rows) / block.step))
    return steps


def _step_flops(size: AttentionSize, backward: bool, block: Block) -> float:
    dims = 3 * size.head_dim_qk + 2 * size.head_dim_v if backward else size.head_dim_qk + size.head_dim_v
    return 2.0 * block.tile_rows * block.step * dims
