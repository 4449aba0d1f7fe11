"""Metrics of a step: their names in files, read and written here alone, and what a larger value means."""

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from aorta.account.model import Direction
from aorta.timeline.types import OverlapRecord


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
OVERLAP_METRICS = tuple(
    name
    for name in OverlapRecord.__struct_fields__
    if name not in ("hidden_by_op", "exposed_by_op", "host_bound")
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
CORES = "cores_used"
"""Of the host, on average over a step, by all threads of the process."""
MEASURES = (WORK, *RATES, ENERGY, *MEMORY, *TELEMETRY, THROTTLED, CORES)
"""Measures of every run, null if unknown. If the device reports that something held its clocks down there
is also throttled.<reason>: 1 in steps for which it did, else 0."""
COUNTED = ("alloc_retries", "device_frees")
"""Counted since the process began; by the step in a run's metrics."""
MEASURED = ("tokens", *COUNTED, *MEMORY, *TELEMETRY)
"""Read from records as they are; none of them is negative."""


class Meaning(NamedTuple):
    """Direction, unit, title and role of a metric."""

    better: Direction
    unit: str
    title: str = ""
    """On the page, without its operation; '' of one that goes by its name."""
    judged: bool = False
    """Gets a verdict, and is allowed for by Holm's method."""


MEANINGS = {
    "step_ms": Meaning("lower", "ms", "step", judged=True),
    "compute_ms": Meaning("lower", "ms", "busy", judged=True),
    "comm_ms": Meaning("lower", "ms", "communication", judged=True),
    "exposed_ms": Meaning("lower", "ms", "exposed communication", judged=True),
    "hidden_ms": Meaning("neither", "ms", "hidden communication", judged=True),
    "idle_ms": Meaning("lower", "ms", "idle", judged=True),
    "overlap_ratio": Meaning("higher", "", "overlap ratio (hidden / communication)", judged=True),
    "transfer_ms": Meaning("lower", "ms", "transfer", judged=True),
    "duration_ms": Meaning("lower", "ms", "duration", judged=True),
    "busbw_gb_s": Meaning("higher", "GB/s", "bus bandwidth", judged=True),
    "count": Meaning("neither", "", "count per step", judged=True),
    "bytes": Meaning("neither", "bytes", "bytes per step", judged=True),
    "wait_ms": Meaning("lower", "ms", "wait"),
    "between_steps_ms": Meaning("lower", "ms", "between steps"),
    "host_ms": Meaning("lower", "ms", "host, step body"),
    "exposed_copy_ms": Meaning("lower", "ms", "copies alone"),
    "exposed_wait_ms": Meaning("lower", "ms", "exposed, waiting for a rank"),
    "exposed_transfer_ms": Meaning("lower", "ms", "exposed, transfer"),
    "hidden_per_compute": Meaning("neither", "", "hidden / compute"),
    "compute_per_step": Meaning("neither", "", "compute / step"),
    "comm_per_step": Meaning("neither", "", "comm / step"),
    "exposed_per_step": Meaning("lower", "", "exposed / step"),
    "idle_per_step": Meaning("lower", "", "idle / step"),
    "compute_allreduce_ms": Meaning("neither", "ms", "hidden all-reduce"),
    "compute_reducescatter_ms": Meaning("neither", "ms", "hidden reduce-scatter"),
    "stalled_ms": Meaning("lower", "ms", "compute stream stalled"),
    "kernel_ms": Meaning("lower", "ms", "kernel time", judged=True),
    "kernel_count": Meaning("neither", "launches", "kernel count"),
    "graph_nodes": Meaning("neither", "", "graph nodes"),
    "copy_ms": Meaning("lower", "ms"),
    "kernel_name_ms": Meaning("lower", "ms", "kernel", judged=True),
    "kernel_name_count": Meaning("neither", "launches", "count of kernel"),
    "starved_bound_ms": Meaning("lower", "ms", "compute stream starved, at most"),
    "starved_hidden_bound_ms": Meaning("lower", "ms", "starved inside hidden, at most"),
    "tokens_per_s_per_gpu": Meaning("higher", "tokens/s", "tokens/s per GPU", judged=True),
    "tokens_per_s": Meaning("higher", "tokens/s", "tokens/s"),
    "samples_per_s": Meaning("higher", "samples/s", "samples/s"),
    "model_tflops_per_gpu": Meaning("higher", "TFLOP/s", "model FLOP/s per GPU"),
    "mfu": Meaning("higher", "", "MFU (model FLOP/s / peak)"),
    "energy_per_token_mj": Meaning("lower", "mJ", "energy per token"),
    "peak_memory_bytes": Meaning("lower", "bytes", "peak memory"),
    "reserved_memory_bytes": Meaning("lower", "bytes", "reserved memory"),
    "device_memory_bytes": Meaning("lower", "bytes", "device memory in use"),
    "alloc_retries": Meaning("lower", "", "allocator retries"),
    "device_frees": Meaning("lower", "", "memory segments given back"),
    "power_w": Meaning("neither", "W", "power"),
    "sm_clock_mhz": Meaning("higher", "MHz", "SM clock"),
    "memory_clock_mhz": Meaning("higher", "MHz", "memory clock"),
    "temperature_c": Meaning("lower", "°C", "temperature"),
    "utilization_percent": Meaning("higher", "percent", "device utilization"),
    "throttled": Meaning("lower", "", "clocks held down"),
    "cores_used": Meaning("neither", "cores", "cores of the host"),
    "tokens_per_step": Meaning("neither", "tokens", "tokens per step"),
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
