"""Names, units and numbers as the page prints them."""

import math

from aorta.report.leading import plain
from aorta.report.palette import MARKS

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
}
STATES = ("compute", "hidden", "exposed", "idle")
STATE_TITLES = {
    "compute": "compute only",
    "hidden": "communication hidden under compute",
    "exposed": "exposed communication",
    "transfer": "exposed, transfer",
    "wait": "exposed, waiting for a rank",
    "idle": "idle",
}
assert set(MARKS) == set(STATE_TITLES) - {"transfer"}
MINUS, DASH, TIMES = "\u2212", "\u2013", "\u00d7"
UNITS = (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))


def title(metric: str) -> str:
    """'exposed communication, all_gather' for exposed_ms.all_gather."""
    for word in ("calibrated", "raw"):
        if metric.startswith(f"{word}."):
            return f"{title(metric.removeprefix(f'{word}.'))}, {word}"
    if metric.startswith("compute_stream."):
        return f"{title(metric.removeprefix('compute_stream.'))}, kernels of the compute stream alone"
    name, _, op = metric.partition(".")
    return TITLES.get(name, name) + (f", {op}" if op else "")


def unit(metric: str) -> str:
    name = plain(metric).partition(".")[0]
    if name.endswith("_ms"):
        return "ms"
    return {"busbw_gb_s": "GB/s", "bytes": "bytes"}.get(name, "")


def number(value: float | None, *, sign: bool = False) -> str:
    """Three digits or more where they mean something: 1,234 41.2 4.31 0.052; a real minus sign."""
    if value is None or not math.isfinite(value):
        return "n/a"
    size = abs(value)
    digits = 0 if size >= 1000 else 1 if size >= 10 else 2 if size >= 1 or size == 0 else 3
    text = f"{size:.1e}" if 0 < size < 0.001 else f"{size:,.{digits}f}"
    return (MINUS if value < 0 else "+" if sign and value > 0 else "") + text


def quantity(value: float | None, of_unit: str, *, sign: bool = False) -> str:
    text = number(value, sign=sign)
    return text if text == "n/a" or not of_unit else f"{text} {of_unit}"


def percent(share: float | None, *, sign: bool = False, digits: int = 0) -> str:
    """Of a share of 1."""
    if share is None or not math.isfinite(share):
        return "n/a"
    text = f"{abs(100 * share):.{digits}f} %"
    zero = text.startswith(f"{0:.{digits}f} ")
    return ("" if zero else MINUS if share < 0 else "+" if sign else "") + text


def byte_text(size: float | None) -> str:
    if size is None:
        return "n/a"
    for name, scale in UNITS:
        if size >= scale:
            return f"{size / scale:.1f} {name}"
    return f"{size:.0f} B"


def counted(num: int, noun: str) -> str:
    return f"{num:,} {noun}{'' if num == 1 else 's'}"
