"""AMD's Origami as a model of GEMMs and attention, where the optional package is installed.

Origami ranks tile shapes in cycles and does not claim absolute times: its cycles are turned into seconds at
the sustained clock of the hardware file, not at the data sheet's. It knows gfx942 and gfx950 here.

Attention is made of GEMMs on one compute unit, for comparison with tools that price it so: a work-group's
GEMMs are priced as problems of their own on a device of one compute unit, then multiplied by the waves of
work-groups. Known faults of the method: that one unit is given the whole L2, the scores go to memory as a
GEMM's result would, and the softmax costs nothing. Use the tile backend for a projection.
"""

import math
from importlib import import_module
from typing import Any

from aorta.errors import ProjectionError
from aorta.hardware import Hardware, RatioInterval
from aorta.projection.estimates import KernelEstimate, estimate
from aorta.projection.gemm import GemmSize
from aorta.projection.sdpa import AttentionSize, Family, checked_family

INTERVAL = RatioInterval(low=0.6, high=1.6)
"""Chosen: no AMD kernels were measured for it."""
DTYPES = {"bf16": "bf16", "fp16": "f16", "fp32": "f32", "tf32": "xf32", "fp8": "f8"}
MATRIX_INSTRUCTION = {
    "gfx942": {"bf16": (16, 16, 16), "fp16": (16, 16, 16), "fp32": (16, 16, 4), "tf32": (16, 16, 8),
               "fp8": (16, 16, 32)},
    "gfx950": {"bf16": (16, 16, 32), "fp16": (16, 16, 32), "fp32": (16, 16, 4), "fp8": (16, 16, 128)},
}  # fmt: skip
"""Rows, columns and depth of the instruction that the kernels of each architecture use."""
SIDES = (16, 32, 64, 96, 128, 192, 256)
TILES = [(m, n, k) for m in SIDES for n in SIDES for k in (32, 64, 128)]
ROWS_OF_WORK_GROUP = 256


class OrigamiGemm:
    """The model for one AMD GPU."""

    def __init__(self, hardware: Hardware) -> None:
        self.origami = load_origami()
        if hardware.architecture not in MATRIX_INSTRUCTION:
            raise ProjectionError(
                f"origami models gfx942 and gfx950, {hardware.name} is {hardware.architecture}; "
                "use --gemm-backend tile"
            )
        self.hardware = hardware
        self.device = self.device_of(hardware.compute.num_cus)
        self._estimates: dict[GemmSize, KernelEstimate] = {}

    def device_of(self, num_cus: int) -> Any:
        """Origami's description of this GPU with that many compute units."""
        compute = self.hardware.compute
        return self.origami.get_hardware_for_arch(
            getattr(self.origami.architecture_t, self.hardware.architecture),
            num_cus,
            int(compute.lds_bytes),
            4 * 1024 * 1024,  # L2 of one XCD; the Infinity Cache is known to Origami
            int(compute.boost_clock_hz / 1e3),
        )

    def simulate(
        self, m: int, n: int, k: int, dtype: str, layout: str = "TN", batch: int = 1
    ) -> KernelEstimate:
        """Seconds of the best tile at the sustained clock, launch included."""
        size = GemmSize(m, n, k, dtype, layout, batch)
        if size not in self._estimates:
            self._estimates[size] = self._simulate(size)
        return self._estimates[size]

    def _simulate(self, size: GemmSize) -> KernelEstimate:
        cycles, tile = self.cycles(size, self.device)
        launch_s = self.hardware.launch.kernel_s
        return estimate(
            cycles / self.hardware.compute.sustained_clock_hz + launch_s,
            "compute",
            "gemm origami",
            INTERVAL,
            {"cycles": cycles, "tile_m": tile[0], "tile_n": tile[1], "tile_k": tile[2], "launch_s": launch_s},
        )

    def cycles(self, size: GemmSize, device: Any) -> tuple[float, tuple[float, float, float]]:
        """Cycles of the best tile on that device, and the tile."""
        instructions = MATRIX_INSTRUCTION[self.hardware.architecture]
        if size.dtype not in instructions:
            # Pricing an unknown type as another is how FP8 came to cost as much as BF16 elsewhere.
            raise ProjectionError(f"origami has no {size.dtype} on {self.hardware.architecture}")
        try:
            best = self.origami.select_config(self._problem(size), device, self._configs(size.dtype))
        except RuntimeError as error:
            shape = f"{size.m} x {size.n} x {size.k} {size.dtype} {size.layout}"
            raise ProjectionError(f"origami has no tile for {shape}: {error}") from None
        tile = best.config.mt
        return float(best.latency), (float(tile.m), float(tile.n), float(tile.k))

    def _problem(self, size: GemmSize) -> Any:
        o = self.origami
        dtype = self._datatype(size.dtype)
        written = o.string_to_datatype("bf16" if size.dtype == "fp8" else DTYPES[size.dtype])
        problem = o.problem_t()
        problem.size = o.dim3_t(size.m, size.n, size.k)
        problem.batch = size.batch
        # BLAS counts columns first: a letter of the layout says whether that operand is transposed there.
        problem.a_transpose = getattr(o.transpose_t, size.layout[0])
        problem.b_transpose = getattr(o.transpose_t, size.layout[1])
        problem.a_dtype = problem.b_dtype = problem.mi_dtype = dtype
        problem.c_dtype = problem.d_dtype = written
        problem.a_mx_block_size = problem.b_mx_block_size = 0
        return problem

    def _datatype(self, dtype: str) -> Any:
        if dtype == "fp8" and self.hardware.architecture == "gfx942":
            return self.origami.data_type_t.Float8_fnuz  # the FP8 of CDNA 3, which has no name as text
        return self.origami.string_to_datatype(DTYPES[dtype])

    def _configs(self, dtype: str) -> list[Any]:
        o = self.origami
        element = {"fp32": 4, "tf32": 4, "fp8": 1}.get(dtype, 2)
        depth = MATRIX_INSTRUCTION[self.hardware.architecture][dtype]
        configs = []
        for m, n, k in TILES:
            fits = (m + n) * k * element <= self.hardware.compute.lds_bytes
            if not fits or k % depth[2]:
                continue
            config = o.config_t()
            config.mt = o.dim3_t(m, n, k)
            config.mi = o.dim3_t(*depth)
            config.occupancy = 1
            configs.append(config)
        return configs


def load_origami() -> Any:
    """The package, or one line that says how to get it."""
    try:
        return import_module("origami")
    except ImportError:
        raise ProjectionError(
            "the origami backend needs the package rocm-origami, scripts/install_origami.sh builds it "
            "(no GPU needed)"
        ) from None


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
