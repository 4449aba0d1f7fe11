"""Attention as arithmetic at a share of the sustained rate, or tensors through HBM, and the launch."""

import msgspec

from aorta.hardware import Hardware, rate_interval, sustained_flops
from aorta.projection.kernels.estimate import KernelEstimate, estimate
from aorta.projection.kernels.sdpa.size import AttentionSize, Family, checked_family


class RooflineSdpa(msgspec.Struct, frozen=True):
    """No tiles and no waves: right for long sequences, optimistic for short ones."""

    hardware: Hardware

    def simulate(self, size: AttentionSize, backward: bool, family: Family = "flash") -> KernelEstimate:
        """Seconds, launch included."""
        checked_family(family)
        fitted = self.hardware.efficiency.sdpa(family)
        share = fitted.backward if backward else fitted.forward
        compute_s = size.flops(backward) / (sustained_flops(self.hardware, size.dtype) * share)
        memory_s = size.bytes_moved(backward) / self.hardware.memory.sustained_hbm_bytes_per_s
        launch_s = self.hardware.launch.kernel_s
        return estimate(
            launch_s + max(compute_s, memory_s),
            "compute" if compute_s >= memory_s else "memory",
            f"attention roofline, {family}",
            rate_interval(self.hardware, size.dtype, fitted.interval),
            {"compute_s": compute_s, "memory_s": memory_s, "launch_s": launch_s},
        )
