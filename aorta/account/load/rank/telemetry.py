"""Work, memory and telemetry of the device: columns of a block of lines."""

from collections.abc import Iterator

import numpy as np

from aorta.account.load.rank.columns import Floats
from aorta.account.metrics import TELEMETRY, THROTTLED, of_operation
from aorta.records.table import StepTable

OF_MEMORY = {
    "peak_allocated_bytes": "peak_memory_bytes",
    "reserved_bytes": "reserved_memory_bytes",
    "num_alloc_retries": "alloc_retries",
    "device_used_bytes": "device_memory_bytes",
}
OF_DEVICE = {**{name: name for name in TELEMETRY}, "memory_used_bytes": "device_memory_bytes"}
"""Metrics by the field of a line."""


def telemetry_metrics(block: StepTable) -> dict[str, Floats]:
    """By metric, a value per line, NaN where it has none; without metrics that no line has. What the device
    says replaces what the allocator says under the same name."""
    metrics: dict[str, Floats] = {}
    for name, values in _columns(block):
        if values is not None:
            earlier = metrics.get(name)
            metrics[name] = values if earlier is None else np.where(np.isnan(values), earlier, values)
    return metrics


def _columns(block: StepTable) -> Iterator[tuple[str, Floats | None]]:
    yield "tokens", block.numbers("tokens")
    for part, names in (("memory", OF_MEMORY), ("device", OF_DEVICE)):
        for name, metric in names.items():
            yield metric, block.numbers(f"{part}.{name}")
    throttling = block.throttling()
    if any(reasons is not None for reasons in throttling):
        is_throttled = [np.nan if reasons is None else float(bool(reasons)) for reasons in throttling]
        yield THROTTLED, np.array(is_throttled)
        for reason in dict.fromkeys(reason for reasons in throttling for reason in reasons or ()):
            has_reason = [1.0 if reasons and reason in reasons else np.nan for reasons in throttling]
            yield of_operation(THROTTLED, reason), np.array(has_reason)
