"""Times of a step and how communication overlaps with compute: columns of a block of lines."""

from collections.abc import Sequence
from itertools import chain

import numpy as np

from aorta.records.step_block import StepBlock, floats
from aorta.report.load.rank.calls import ROUNDING_MS
from aorta.report.load.rank.columns import Floats
from aorta.report.metrics import (
    CALIBRATED_METRICS,
    COMPUTE_STREAM_METRICS,
    OVERLAP_METRICS,
    STEP_METRICS,
    MetricSource,
    of_operation,
    of_source,
)


def overlap_metrics(block: StepBlock) -> dict[str, Floats]:
    """By metric, a value per line, NaN where it has none; without metrics that no line has."""
    columns = {name: block.floats[name] for name in STEP_METRICS}
    columns |= {name: floats(block.overlap[name]) for name in OVERLAP_METRICS}
    metrics = {name: values for name, values in columns.items() if values is not None}
    return metrics | _operations(block) | _calibrated(block) | _compute_stream(block)


def _operations(block: StepBlock) -> dict[str, Floats]:
    """exposed_ms.<op> and comm_ms.<op>"""
    metrics = {}
    hidden, exposed = block.overlap["hidden_by_op"], block.overlap["exposed_by_op"]
    for op in dict.fromkeys(chain.from_iterable(exposed)):
        exposed_ms = floats([of_record.get(op) for of_record in exposed])
        hidden_ms = floats([of_record.get(op) for of_record in hidden])
        if exposed_ms is not None:
            metrics[of_operation("exposed_ms", op)] = exposed_ms
            if hidden_ms is not None and not np.isnan(hidden_ms + exposed_ms).all():
                metrics[of_operation("comm_ms", op)] = hidden_ms + exposed_ms
    return metrics


def _calibrated(block: StepBlock) -> dict[str, Floats]:
    """calibrated.<metric>: sums of many pieces. What is below 0, or hidden above comm, by rounding alone is
    neither."""
    if not any(block.overlap["calibrated"]):
        return {}
    columns = _fields(block.overlap["calibrated"], CALIBRATED_METRICS)
    rounded = {
        name: np.where((values > -ROUNDING_MS) & (values < 0), 0.0, values)
        for name, values in columns.items()
    }
    comm_ms, hidden_ms = rounded["comm_ms"], rounded["hidden_ms"]
    is_rounding = (comm_ms < hidden_ms) & (hidden_ms < comm_ms + ROUNDING_MS)
    rounded["hidden_ms"] = np.where(is_rounding, comm_ms, hidden_ms)
    return _with_ratios("calibrated", rounded, columns["comm_ms"])


def _compute_stream(block: StepBlock) -> dict[str, Floats]:
    """compute_stream.<metric>"""
    if not any(block.overlap["compute_stream"]):
        return {}
    columns = _fields(block.overlap["compute_stream"], COMPUTE_STREAM_METRICS)
    comm_ms = np.array(block.overlap["comm_ms"], dtype=np.float64)
    return _with_ratios("compute_stream", columns, comm_ms)


def _fields(parts: Sequence[object | None], names: Sequence[str]) -> dict[str, Floats]:
    """Fields of a part of each line, NaN where a line lacks it or has no value."""
    return {name: np.array([getattr(part, name, None) for part in parts], dtype=np.float64) for name in names}


def _with_ratios(source: MetricSource, columns: dict[str, Floats], comm_ms: Floats) -> dict[str, Floats]:
    """Numbers beside those of METRICS, with the ratios that are made of them."""
    metrics = {of_source(source, name): values for name, values in columns.items()}
    for name, total_ms in (("overlap_ratio", comm_ms), ("hidden_per_compute", columns["compute_ms"])):
        ratio = np.full(len(total_ms), np.nan)
        np.divide(columns["hidden_ms"], total_ms, out=ratio, where=total_ms > 0)
        if not np.isnan(ratio).all():
            metrics[of_source(source, name)] = ratio
    return metrics
