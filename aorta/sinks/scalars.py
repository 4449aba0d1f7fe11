"""Numbers of a step that sinks send on, under one set of names."""

from aorta.records.schema import StepRecord

HELP = {
    "step_ms": "Length of the step's window, from its start to the next step's start",
    "compute_ms": "Time in which the rank computed",
    "comm_ms": "Time in which a collective of the rank ran; concurrent ones count once",
    "exposed_ms": "Communication during which the rank computed nothing",
    "hidden_ms": "Communication under compute",
    "idle_ms": "Time in which the rank neither communicated nor computed",
    "overlap_ratio": "Hidden over all communication",
    "between_steps_ms": "Part of the window after the step's body: data loading, logging",
    "tokens_per_s": "Tokens of this rank over the step's window",
    "loss": "Loss as logged by the program",
    "lr": "Learning rate as logged by the program",
    "grad_norm": "Gradient norm as logged by the program",
    "memory_allocated_bytes": "Bytes that torch's allocator gave out at the end of the step",
    "memory_reserved_bytes": "Bytes that torch's allocator holds at the end of the step",
    "device_used_bytes": "Bytes in use on the device, by all processes",
    "power_w": "Power draw of the device",
    "sm_clock_mhz": "Clock of the multiprocessors",
    "temperature_c": "Temperature of the device",
}
"""Meaning of each number, for sinks that show one."""


def scalars(record: StepRecord) -> dict[str, float]:
    """Numbers that were measured of the step; others are left out."""
    overlap, memory, device = record.overlap, record.memory, record.device
    tokens_per_s = None
    if record.tokens is not None and record.step_ms:
        tokens_per_s = record.tokens / record.step_ms * 1e3
    values: dict[str, float | None] = {
        "step_ms": record.step_ms,
        "compute_ms": overlap.compute_ms,
        "comm_ms": overlap.comm_ms,
        "exposed_ms": overlap.exposed_ms,
        "hidden_ms": overlap.hidden_ms,
        "idle_ms": overlap.idle_ms,
        "overlap_ratio": overlap.overlap_ratio,
        "between_steps_ms": record.between_steps_ms,
        "tokens_per_s": tokens_per_s,
        "loss": record.loss,
        "lr": record.lr,
        "grad_norm": record.grad_norm,
        "memory_allocated_bytes": None if memory is None else memory.allocated_bytes,
        "memory_reserved_bytes": None if memory is None else memory.reserved_bytes,
        "device_used_bytes": None if device is None else device.memory_used_bytes,
        "power_w": None if device is None else device.power_w,
        "sm_clock_mhz": None if device is None else device.sm_clock_mhz,
        "temperature_c": None if device is None else device.temperature_c,
    }
    values |= record.scalars
    return {name: value for name, value in values.items() if value is not None}
