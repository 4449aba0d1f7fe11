"""Metrics of a step: their names in files, read and written here alone, and what a larger value means."""

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from aorta.account.model import Direction


class MetricKey(NamedTuple):
    """A metric: its name, and the operation (collective, kernel class, reason) it is limited to.

    str() gives the key of Run.metrics and summary.json: exposed_ms, busbw_gb_s.all_gather, throttled.thermal.
    """

    name: str
    operation: str = ""

    def __str__(self) -> str:
        return ".".join(part for part in self if part)


@lru_cache(maxsize=4096)
def metric_key(text: str) -> MetricKey:
    """The parts of a key, whatever text it is: a name that no report knows is a name all the same."""
    name, _, operation = text.partition(".")
    return MetricKey(name, operation)


@lru_cache(maxsize=4096)
def of_operation(name: str, operation: str) -> str:
    """'busbw_gb_s.all_gather'"""
    return str(MetricKey(name, operation))


def operations(keys: Iterable[str], name: str) -> list[str]:
    """Operations for which there is a metric of this name, in order of the keys."""
    parsed = (metric_key(text) for text in keys)
    return [key.operation for key in parsed if key.name == name and key.operation]


STEP_METRICS = ("step_ms", "between_steps_ms", "host_ms")
OVERLAP_METRICS = (
    "comm_ms",
    "compute_ms",
    "hidden_ms",
    "exposed_ms",
    "idle_ms",
    "exposed_copy_ms",
    "overlap_ratio",
    "hidden_per_compute",
    "compute_allreduce_ms",
    "compute_reducescatter_ms",
    "stalled_ms",
    "starved_bound_ms",
    "starved_hidden_bound_ms",
)
PER_STEP = ("compute", "comm", "exposed", "idle")
"""Metrics also given as a share of the step: <name>_per_step."""
METRICS = (*STEP_METRICS, *OVERLAP_METRICS)
"""Metrics of every record, in the order of reports. Per operation there is also comm_ms.<op>,
exposed_ms.<op>, duration_ms.<op>, busbw_gb_s.<op>, count.<op> and bytes.<op>; where ranks were matched
exposed_wait_ms, exposed_transfer_ms, wait_ms.<op> and transfer_ms.<op>; kernel_ms.<class> and
kernel_count.<class> of kernel records, and kernel_name_ms.<name> and kernel_name_count.<name> of the
longest."""
RATES = ("tokens_per_s_per_gpu", "tokens_per_s", "model_tflops_per_gpu", "mfu")
"""Work per time, the most telling first."""
MEMORY = ("peak_memory_bytes", "reserved_memory_bytes", "device_memory_bytes")
TELEMETRY = ("power_w", "sm_clock_mhz", "memory_clock_mhz", "temperature_c", "utilization_percent")
WORK = "tokens_per_step"
ENERGY = "energy_per_token_mj"
THROTTLED = "throttled"
MEASURES = (WORK, *RATES, ENERGY, *MEMORY, *TELEMETRY, THROTTLED)
"""Measures of every run, null if unknown. If the device reports that something held its clocks down there
is also throttled.<reason>: 1 in steps for which it did, else 0."""
COUNTED = ("alloc_retries", "device_frees")
"""Counted since the process began; by the step in a run's metrics."""
MEASURED = ("tokens", *COUNTED, *MEMORY, *TELEMETRY)
"""Read from records as they are; none of them is negative."""


class Meaning(NamedTuple):
    """Direction, unit and role of a metric in a comparison."""

    better: Direction
    unit: str
    judged: bool = False
    """Gets a verdict, and is allowed for by Holm's method."""


MEANINGS = {
    "step_ms": Meaning("lower", "ms", judged=True),
    "compute_ms": Meaning("lower", "ms", judged=True),
    "comm_ms": Meaning("lower", "ms", judged=True),
    "exposed_ms": Meaning("lower", "ms", judged=True),
    "hidden_ms": Meaning("neither", "ms", judged=True),
    "idle_ms": Meaning("lower", "ms", judged=True),
    "overlap_ratio": Meaning("higher", "", judged=True),
    "transfer_ms": Meaning("lower", "ms", judged=True),
    "duration_ms": Meaning("lower", "ms", judged=True),
    "busbw_gb_s": Meaning("higher", "GB/s", judged=True),
    "count": Meaning("neither", "", judged=True),
    "bytes": Meaning("neither", "bytes", judged=True),
    "wait_ms": Meaning("lower", "ms"),
    "between_steps_ms": Meaning("lower", "ms"),
    "host_ms": Meaning("lower", "ms"),
    "exposed_copy_ms": Meaning("lower", "ms"),
    "exposed_wait_ms": Meaning("lower", "ms"),
    "exposed_transfer_ms": Meaning("lower", "ms"),
    "hidden_per_compute": Meaning("neither", ""),
    "compute_per_step": Meaning("neither", ""),
    "comm_per_step": Meaning("neither", ""),
    "exposed_per_step": Meaning("lower", ""),
    "idle_per_step": Meaning("lower", ""),
    "compute_allreduce_ms": Meaning("neither", "ms"),
    "compute_reducescatter_ms": Meaning("neither", "ms"),
    "stalled_ms": Meaning("lower", "ms"),
    "kernel_ms": Meaning("lower", "ms", judged=True),
    "kernel_count": Meaning("neither", "launches"),
    "graph_nodes": Meaning("neither", ""),
    "copy_ms": Meaning("lower", "ms"),
    "kernel_name_ms": Meaning("lower", "ms", judged=True),
    "kernel_name_count": Meaning("neither", "launches"),
    "starved_bound_ms": Meaning("lower", "ms"),
    "starved_hidden_bound_ms": Meaning("lower", "ms"),
    "tokens_per_s_per_gpu": Meaning("higher", "tokens/s", judged=True),
    "tokens_per_s": Meaning("higher", "tokens/s"),
    "samples_per_s": Meaning("higher", "samples/s"),
    "model_tflops_per_gpu": Meaning("higher", "TFLOP/s"),
    "mfu": Meaning("higher", ""),
    "energy_per_token_mj": Meaning("lower", "mJ"),
    "peak_memory_bytes": Meaning("lower", "bytes"),
    "reserved_memory_bytes": Meaning("lower", "bytes"),
    "device_memory_bytes": Meaning("lower", "bytes"),
    "alloc_retries": Meaning("lower", ""),
    "device_frees": Meaning("lower", ""),
    "power_w": Meaning("neither", "W"),
    "sm_clock_mhz": Meaning("higher", "MHz"),
    "memory_clock_mhz": Meaning("higher", "MHz"),
    "temperature_c": Meaning("lower", "°C"),
    "utilization_percent": Meaning("higher", "percent"),
    "throttled": Meaning("lower", ""),
    "tokens_per_step": Meaning("neither", "tokens"),
}
"""Meanings by the name before a dot: transfer_ms covers transfer_ms.all_gather too. comm_ms.<op> and
exposed_ms.<op> are shown without a verdict of their own, and so is tokens_per_s_per_gpu if a step holds
the same work on both sides: it then says the same as step time."""


def meaning(text: str) -> Meaning:
    """Meaning of a metric, whatever operation it is limited to."""
    key = metric_key(text)
    entry = MEANINGS.get(key.name, Meaning("neither", "ms" if key.name.endswith("_ms") else ""))
    is_shown_only = bool(key.operation) and key.name in ("comm_ms", "exposed_ms")
    return entry._replace(judged=False) if is_shown_only else entry
