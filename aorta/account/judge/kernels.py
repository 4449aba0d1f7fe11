"""Kernels of the mean step of the account, by class and by name: beside its cells, in the same means."""

from collections.abc import Iterable

import numpy as np

from aorta.account.judge.judged import looked_at
from aorta.account.judge.operators import operator_rows
from aorta.account.load.rank.kernels import (
    COUNT,
    MOST_NAMES,
    NAME_COUNT,
    NAME_TIME,
    TIME,
    KernelTimeRow,
    kernel_rows,
)
from aorta.account.metrics import of_operation, operations
from aorta.account.model import Dataset
from aorta.account.numbers import percent, quantity
from aorta.records.schema import KERNEL_CLASSES


def kernels_by_class(dataset: Dataset) -> list[KernelTimeRow]:
    """No row where the source does not tell kernels apart."""
    return _rows(dataset, TIME, COUNT, KERNEL_CLASSES)


def kernels_by_name(dataset: Dataset) -> list[KernelTimeRow]:
    """Those that took most time."""
    names = operations(dataset.first.metrics, NAME_TIME)
    return _rows(dataset, NAME_TIME, NAME_COUNT, names)[:MOST_NAMES]


def operators(dataset: Dataset) -> list[KernelTimeRow]:
    """Of a trace that was read with its operators, in its judged steps."""
    first = dataset.first
    return operator_rows(first.inventories, first.num_warmup)


def queue_text(dataset: Dataset) -> str:
    """How far the host launches ahead, beside the operators of a trace; '' where launches are not linked."""
    queues = [rank.queue for rank in dataset.first.inventories if rank.queue is not None]
    if not queues:
        return ""
    depth, empty, ahead_ms = (float(np.mean(values)) for values in list(zip(*queues, strict=True))[:3])
    return (
        f"queue: at a launch {depth:,.0f} kernels and copies wait or run (median of"
        f" {sum(queue.num_launches for queue in queues):,} launches), none at {percent(empty)} of launches;"
        f" work starts {quantity(ahead_ms, 'ms')} after its launch"
    )


def _rows(dataset: Dataset, time: str, count: str, names: Iterable[str]) -> list[KernelTimeRow]:
    looked = looked_at(dataset.first)
    means = {}
    for name in names:
        time_ms, num = (looked.mean_of(of_operation(metric, name)) for metric in (time, count))
        if time_ms is not None and num is not None:
            means[name] = (time_ms, num)
    return kernel_rows(means)
