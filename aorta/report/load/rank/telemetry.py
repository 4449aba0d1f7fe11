"""Work, memory and telemetry of the device: columns of a block of lines."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from aorta.records.step_block import StepBlock, fields_of, floats
from aorta.report.load.rank.columns import Floats
from aorta.report.metrics import TELEMETRY, THROTTLED, of_operation

OF_MEMORY = {
    "peak_allocated_bytes": "peak_memory_bytes",
    "reserved_bytes": "reserved_memory_bytes",
    "num_alloc_retries": "alloc_retries",
    "device_used_bytes": "device_memory_bytes",
}
OF_DEVICE = {**{name: name for name in TELEMETRY}, "memory_used_bytes": "device_memory_bytes"}
"""Metrics by the field of a line."""


def telemetry_metrics(block: StepBlock) -> dict[str, Floats]:
    """By metric, a value per line, NaN where it has none; without metrics that no line has. What the device
    says replaces what the allocator says under the same name."""
    metrics: dict[str, Floats] = {}
    for name, column in _columns(block):
        values = floats(column)
        if values is not None:
            earlier = metrics.get(name)
            metrics[name] = values if earlier is None else np.where(np.isnan(values), earlier, values)
    return metrics


def _columns(block: StepBlock) -> Iterator[tuple[str, Sequence[float | None]]]:
    yield "tokens", block.values["tokens"]
    memory = _fields(block.values["memory"], OF_MEMORY)
    yield from ((OF_MEMORY[name], values) for name, values in memory.items())
    devices = block.values["device"]
    device = _fields(devices, OF_DEVICE)
    if not device:
        return
    yield from ((OF_DEVICE[name], values) for name, values in device.items())
    throttling = [None if line is None else line.throttling for line in devices]
    if any(reasons is not None for reasons in throttling):
        yield THROTTLED, [None if reasons is None else float(bool(reasons)) for reasons in throttling]
        for reason in dict.fromkeys(reason for reasons in throttling for reason in reasons or ()):
            yield (
                of_operation(THROTTLED, reason),
                [1.0 if reasons is not None and reason in reasons else None for reasons in throttling],
            )


def _fields(parts: Sequence[Any], names: Iterable[str]) -> dict[str, Sequence[float | None]]:
    """Fields of a part that lines may lack; nothing where all do."""
    if not any(parts):
        return {}
    present = [part for part in parts if part is not None]
    columns: dict[str, Sequence[float | None]] = {}
    for name, values in fields_of(present, tuple(names)).items():
        left = iter(values)
        columns[name] = (
            values if len(present) == len(parts) else [None if part is None else next(left) for part in parts]
        )
    return columns
