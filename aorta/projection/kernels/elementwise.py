"""An element-wise kernel or copy: traffic, vector arithmetic and launch."""

from aorta.hardware import Hardware, dtype_bytes
from aorta.projection.kernels.estimate import KernelEstimate, estimate


def memory_bound(
    hardware: Hardware, bytes_read: float, bytes_written: float, flops: float = 0.0, dtype: str = "fp32"
) -> KernelEstimate:
    """An element-wise kernel or copy: HBM traffic or vector arithmetic, and the launch.

    Nothing is assumed to be in a cache. dtype is that of the arithmetic.
    """
    traffic_s = (bytes_read + bytes_written) / hardware.memory.sustained_hbm_bytes_per_s
    vector_rate = hardware.compute.vector_flops * (2.0 if dtype_bytes(dtype) == 2 else 1.0)
    compute_s = flops / vector_rate
    launch_s = hardware.launch.kernel_s + hardware.launch.ramp_s
    work_s = max(traffic_s, compute_s)
    bound = "latency" if work_s < launch_s else "memory" if traffic_s >= compute_s else "compute"
    return estimate(
        launch_s + work_s,
        bound,
        "memory roofline",
        hardware.efficiency.memory_interval,
        {"traffic_s": traffic_s, "compute_s": compute_s, "launch_s": launch_s},
    )
