"""Names, units and numbers as the page prints them."""

from aorta.report import numbers
from aorta.report.metrics import meaning, metric_key
from aorta.report.numbers import MINUS as MINUS
from aorta.report.numbers import counted as counted
from aorta.report.output.palette import MARKS

TITLES = {
    "step_ms": "step",
    "compute_ms": "compute",
    "comm_ms": "communication",
    "hidden_ms": "hidden communication",
    "exposed_ms": "exposed communication",
    "exposed_wait_ms": "exposed, waiting for a rank",
    "exposed_transfer_ms": "exposed, transfer",
    "idle_ms": "idle",
    "exposed_copy_ms": "copies alone",
    "overlap_ratio": "overlap ratio (hidden / communication)",
    "hidden_per_compute": "hidden / compute",
    "compute_per_step": "compute / step",
    "comm_per_step": "comm / step",
    "exposed_per_step": "exposed / step",
    "idle_per_step": "idle / step",
    "between_steps_ms": "between steps",
    "host_ms": "host, step body",
    "compute_allreduce_ms": "hidden all-reduce",
    "compute_reducescatter_ms": "hidden reduce-scatter",
    "stalled_ms": "compute stream stalled",
    "starved_bound_ms": "compute stream starved, at most",
    "starved_hidden_bound_ms": "starved inside hidden, at most",
    "duration_ms": "duration",
    "wait_ms": "wait",
    "transfer_ms": "transfer",
    "busbw_gb_s": "bus bandwidth",
    "count": "count per step",
    "bytes": "bytes per step",
    "tokens_per_step": "tokens per step",
    "tokens_per_s_per_gpu": "tokens/s per GPU",
    "tokens_per_s": "tokens/s",
    "model_tflops_per_gpu": "model FLOP/s per GPU",
    "mfu": "MFU (model FLOP/s / peak)",
    "energy_per_token_mj": "energy per token",
    "peak_memory_bytes": "peak memory",
    "reserved_memory_bytes": "reserved memory",
    "device_memory_bytes": "device memory in use",
    "alloc_retries": "allocator retries",
    "power_w": "power",
    "sm_clock_mhz": "SM clock",
    "memory_clock_mhz": "memory clock",
    "temperature_c": "temperature",
    "utilization_percent": "device utilization",
    "throttled": "clocks held down",
}
STATE_TITLES = {
    "compute": "compute only",
    "hidden": "communication hidden under compute",
    "exposed": "exposed communication",
    "transfer": "exposed, transfer",
    "wait": "exposed, waiting for a rank",
    "idle": "idle",
}
assert set(MARKS) == set(STATE_TITLES) - {"transfer"}
DASH, TIMES = "\u2013", "\u00d7"


def title(metric: str) -> str:
    """'exposed communication, all_gather' for exposed_ms.all_gather."""
    name, op, source = metric_key(metric)
    text = TITLES.get(name, name) + (f", {op}" if op else "")
    words = "kernels of the compute stream alone" if source == "compute_stream" else source
    return f"{text}, {words}" if words else text


def unit(metric: str) -> str:
    return meaning(metric_key(metric).name).unit


def number(value: float | None, *, sign: bool = False) -> str:
    """A number with a real minus sign."""
    return numbers.number(value, sign=sign, minus=MINUS)


def quantity(value: float | None, of_unit: str, *, sign: bool = False) -> str:
    return numbers.quantity(value, of_unit, sign=sign, minus=MINUS)


def percent(share: float | None, *, sign: bool = False, digits: int = 0) -> str:
    """A share of 1 in percent."""
    return numbers.percent(share, sign=sign, digits=digits, minus=MINUS)


def byte_text(size: float | None) -> str:
    return numbers.byte_text(size)
