"""Times of a step and how communication overlaps with compute: columns of a block of lines."""

from collections.abc import Sequence

import numpy as np

from aorta.account.load.rank.calls import ROUNDING_MS
from aorta.account.load.rank.columns import Floats
from aorta.account.metrics import (
    CALIBRATED_METRICS,
    COMPUTE_STREAM_METRICS,
    OVERLAP_METRICS,
    STEP_METRICS,
    MetricSource,
    of_operation,
    of_source,
)
from aorta.records.table import StepTable


def overlap_metrics(block: StepTable) -> dict[str, Floats]:
    """By metric, a value per line, NaN where it has none; without metrics that no line has."""
    columns = {name: block.numbers(name) for name in (*STEP_METRICS, *OVERLAP_METRICS)}
    metrics = {name: values for name, values in columns.items() if values is not None}
    return metrics | _operations(block) | _calibrated(block) | _compute_stream(block)


def _operations(block: StepTable) -> dict[str, Floats]:
    """exposed_ms.<op> and comm_ms.<op>"""
    metrics = {}
    for op in block.operations():
        exposed_ms, hidden_ms = (block.numbers(f"{name}_by_op.{op}") for name in ("exposed", "hidden"))
        if exposed_ms is not None:
            metrics[of_operation("exposed_ms", op)] = exposed_ms
            if hidden_ms is not None and not np.isnan(hidden_ms + exposed_ms).all():
                metrics[of_operation("comm_ms", op)] = hidden_ms + exposed_ms
    return metrics


def _calibrated(block: StepTable) -> dict[str, Floats]:
    """calibrated.<metric>: sums of many pieces. What is below 0, or hidden above comm, by rounding alone is
    neither."""
    columns = _fields(block, "calibrated", CALIBRATED_METRICS)
    if not columns:
        return {}
    rounded = {
        name: np.where((values > -ROUNDING_MS) & (values < 0), 0.0, values)
        for name, values in columns.items()
    }
    comm_ms, hidden_ms = rounded["comm_ms"], rounded["hidden_ms"]
    is_rounding = (comm_ms < hidden_ms) & (hidden_ms < comm_ms + ROUNDING_MS)
    rounded["hidden_ms"] = np.where(is_rounding, comm_ms, hidden_ms)
    return _with_ratios("calibrated", rounded, columns["comm_ms"])


def _compute_stream(block: StepTable) -> dict[str, Floats]:
    """compute_stream.<metric>"""
    columns = _fields(block, "compute_stream", COMPUTE_STREAM_METRICS)
    if not columns:
        return {}
    comm_ms = block.numbers("comm_ms")
    return _with_ratios(
        "compute_stream", columns, np.full(len(block), np.nan) if comm_ms is None else comm_ms
    )


def _fields(block: StepTable, part: str, names: Sequence[str]) -> dict[str, Floats]:
    """Fields of a part that every line has whole or not at all; nothing where no line has it."""
    columns = {name: block.numbers(f"{part}.{name}") for name in names}
    return {name: values for name, values in columns.items() if values is not None}


def _with_ratios(source: MetricSource, columns: dict[str, Floats], comm_ms: Floats) -> dict[str, Floats]:
    """Numbers beside those of METRICS, with the ratios that are made of them."""
    metrics = {of_source(source, name): values for name, values in columns.items()}
    for name, total_ms in (("overlap_ratio", comm_ms), ("hidden_per_compute", columns["compute_ms"])):
        ratio = np.full(len(total_ms), np.nan)
        np.divide(columns["hidden_ms"], total_ms, out=ratio, where=total_ms > 0)
        if not np.isnan(ratio).all():
            metrics[of_source(source, name)] = ratio
    return metrics
