"""The least time that an iteration could take on this device, at the peak rates of config/hardware."""

from aorta.errors import AortaError
from aorta.queues.workload import DeviceWork
from aorta.results.metrics import not_measured
from aorta.results.schema import Metric


def device_bound_ms(work: DeviceWork | None, device: str) -> Metric:
    """Arithmetic at the data sheet's rate of the matrix units, or traffic at that of memory, whichever takes
    longer; null with the reason where the workload or config/hardware does not say.

    device: as the driver names it.
    """
    if work is None:
        return not_measured("ms", "the workload does not state its arithmetic and traffic")
    try:
        from aorta.hardware import hardware_name_of, load_hardware
    except ImportError as error:
        return not_measured("ms", f"config/hardware cannot be read: {error}")
    name = hardware_name_of(device)
    if name is None:
        return not_measured("ms", f"config/hardware has no rates of {device}")
    try:
        hardware = load_hardware(name)
    except AortaError as error:
        return not_measured("ms", str(error))
    missing = [dtype for dtype in work.flops if dtype not in hardware.compute.peak_flops]
    if missing:
        return not_measured("ms", f"config/hardware/{name}.yaml has no rate for {', '.join(missing)}")
    compute_s = sum(flops / hardware.compute.peak_flops[dtype] for dtype, flops in work.flops.items())
    memory_s = work.bytes / hardware.memory.hbm_bytes_per_s
    return Metric(value=1e3 * max(compute_s, memory_s), unit="ms", better="neither")
