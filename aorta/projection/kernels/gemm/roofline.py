"""The least a GEMM can cost: arithmetic at the sustained rate or operands through HBM, and the launch."""

import msgspec

from aorta.hardware import Hardware, rate_interval, sustained_flops
from aorta.projection.kernels.estimate import KernelEstimate, estimate
from aorta.projection.kernels.gemm.size import GemmSize


class RooflineGemm(msgspec.Struct, frozen=True):
    """Optimistic by design for small or badly shaped problems; see the tile backend."""

    hardware: Hardware

    def simulate(
        self, m: int, n: int, k: int, dtype: str, layout: str = "TN", batch: int = 1
    ) -> KernelEstimate:
        """Seconds, launch included."""
        size = GemmSize(m, n, k, dtype, layout, batch)
        compute_s = size.flops / sustained_flops(self.hardware, dtype)
        memory_s = (size.bytes_read + size.bytes_written) / self.hardware.memory.sustained_hbm_bytes_per_s
        launch_s = self.hardware.launch.kernel_s
        work_s = max(compute_s, memory_s)
        bound = "latency" if work_s < launch_s else "compute" if compute_s >= memory_s else "memory"
        return estimate(
            launch_s + work_s,
            bound,
            "gemm roofline",
            rate_interval(self.hardware, dtype, self.hardware.efficiency.gemm.interval),
            {"compute_s": compute_s, "memory_s": memory_s, "launch_s": launch_s},
        )
