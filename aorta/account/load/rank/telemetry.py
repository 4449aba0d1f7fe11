"""Tokens, memory and telemetry of the device, by line.

A line without details has memory and the sample of the device only where they are not those of the line
before (aorta.steps.told): a recorded step has the last ones.
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from aorta.account.metrics import TELEMETRY, THROTTLED, of_operation
from aorta.records.table import NULL, StepTable
from aorta.timeline.arrays import Floats

OF_MEMORY = {
    "peak_allocated_bytes": "peak_memory_bytes",
    "reserved_bytes": "reserved_memory_bytes",
    "num_alloc_retries": "alloc_retries",
    "num_device_frees": "device_frees",
}
OF_DEVICE = {**{name: name for name in TELEMETRY}, "memory_used_bytes": "device_memory_bytes"}
"""Metrics by the field of a line."""


class Telemetry:
    """Reads the blocks of one file, in order."""

    def __init__(self) -> None:
        self._held: dict[str, dict[str, float]] = {"memory": {}, "device": {}}
        """Values of the last line that has the part."""

    def of(self, block: StepTable) -> dict[str, Floats]:
        """By metric, a value per line, NaN where it has none; without metrics that no line has."""
        metrics = {} if (tokens := block.numbers("tokens")) is None else {"tokens": tokens}
        for part, values in (
            ("memory", _numbers(block, "memory", OF_MEMORY)),
            ("device", _numbers(block, "device", OF_DEVICE) | _throttling(block)),
        ):
            key = "allocated_bytes" if part == "memory" else "sample_unix_ns"
            metrics |= self._kept(block, part, key, values)
        return metrics

    def _kept(self, block: StepTable, part: str, key: str, values: Mapping[str, Floats]) -> dict[str, Floats]:
        """The columns, with the last values in recorded steps whose line lacks the part."""
        held = self._held[part]
        if not held and not values:
            return {}
        has_part = np.not_equal(block.integers(f"{part}.{key}"), NULL)
        compute_ms = block.numbers("compute_ms")
        lacks = np.zeros(len(block), dtype=bool) if compute_ms is None else ~np.isnan(compute_ms) & ~has_part
        if has_part.any():
            last = int(np.flatnonzero(has_part)[-1])
            self._held[part] = {name: float(column[last]) for name, column in values.items()}
        if not lacks.any():
            return dict(values)
        place = np.maximum.accumulate(np.where(has_part, np.arange(len(block)), -1))[lacks]
        columns = {}
        for name in dict.fromkeys((*values, *held)):
            column = values.get(name, np.full(len(block), np.nan)).copy()
            column[lacks] = np.append(column, held.get(name, np.nan))[place]
            columns[name] = column
        return columns


def _numbers(block: StepTable, part: str, names: Mapping[str, str]) -> dict[str, Floats]:
    columns = {metric: block.numbers(f"{part}.{name}") for name, metric in names.items()}
    return {metric: column for metric, column in columns.items() if column is not None}


def _throttling(block: StepTable) -> dict[str, Floats]:
    places, lists = block.throttling()
    if not (places >= 0).any():
        return {}
    columns = {THROTTLED: _of_places(places, [float(bool(reasons)) for reasons in lists])}
    first = [lists[place] for place in dict.fromkeys(places.tolist()) if place >= 0]
    for reason in dict.fromkeys(reason for reasons in first for reason in reasons):
        has_reason = [1.0 if reason in reasons else np.nan for reasons in lists]
        columns[of_operation(THROTTLED, reason)] = _of_places(places, has_reason)
    return columns


def _of_places(places: NDArray[np.int32], values: list[float]) -> Floats:
    return np.array([*values, np.nan])[places]
