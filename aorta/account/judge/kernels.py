"""Kernels by class and by name, in the mean step of the account; operators of a traced step.

The least time of an operator is by its shapes: multiplications at the sustained rate of the matrix units, or
bytes at the sustained rate of the memory (aorta.hardware), inputs read and results written once. It is not
known of operators whose shapes do not tell their work (convolutions, indexing), nor on unknown devices.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from aorta.account.judge.judged import looked_at
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
from aorta.account.numbers import number, percent, quantity
from aorta.hardware.names import hardware_name_of
from aorta.hardware.part import Hardware, load_hardware
from aorta.records.schema import KERNEL_CLASSES

if TYPE_CHECKING:
    from aorta.traces.inventory import Inventory, WorkKey


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


MOST_OPERATORS = 20
BYTES = {
    **dict.fromkeys(("fp64", "int64"), 8),
    **dict.fromkeys(("fp32", "int32"), 4),
    **dict.fromkeys(("bf16", "fp16"), 2),
    **dict.fromkeys(("fp8", "bool", "uint8", "int8"), 1),
}
_PRODUCT = re.compile(r"(_scaled_)?(mm|addmm|bmm|baddbmm)")
_ATTENTION = re.compile(r"_(scaled_dot_product|flash|efficient|cudnn)\w*attention(_forward)?")
_ATTENTION_BACKWARD = re.compile(r"_(scaled_dot_product|flash|efficient|cudnn)\w*attention_backward")
_IN_AND_OUT = re.compile(
    r"(add|sub|rsub|mul|div|neg|abs|exp|log|pow|sqrt|rsqrt|relu|gelu|silu|sigmoid|tanh|clamp(_min|_max)?|addcmul|addcdiv|lerp"
    r"|threshold_backward|(gelu|silu|sigmoid|tanh)_backward|masked_fill|where|_(log_)?softmax|native_layer_norm)_?"
)
_INPUTS = re.compile(r"copy_|sum|mean|amax|amin|norm|linalg_vector_norm|fill_|zero_")
"""copy_: the first is the result. fill_ and zero_ write theirs."""


def operator_rows(ranks: "Sequence[Inventory]", first_step: int) -> list[KernelTimeRow]:
    """By operator, shapes and types, means over steps from first_step on and over ranks, the longest first.
    Without collectives, and without kernels that no operator launched (graphs, other languages)."""
    found: dict[tuple[str, str, str, str], list[WorkKey]] = defaultdict(list)
    sums: dict[WorkKey, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for rank in ranks:
        for key, times in rank.work.items():
            if key.operator and key.kind != "collective":
                for place, values in enumerate(times):
                    sums[key][place] += float(np.mean(values[first_step:])) / len(ranks)
    for key in sums:
        found[key.operator, key.shapes, key.types, key.repeated].append(key)
    name = hardware_name_of(ranks[0].device or "") if ranks else None
    hardware = load_hardware(name) if name else None
    rows = []
    for (operator, shapes, types, _), keys in found.items():
        time_ms = sum(sums[key][0] for key in keys)
        by_kernel: dict[str, float] = defaultdict(float)
        for key in keys:
            by_kernel[key.name] += sums[key][1]
        calls = max(by_kernel.values())  # an operator may launch several kernels
        if time_ms and calls:
            achieved, least_ms = _work(keys[0], hardware, time_ms / calls)
            kinds = list(dict.fromkeys(types.split(", ")))
            rows.append(
                KernelTimeRow(
                    " ".join(filter(None, (operator.removeprefix("aten::"), shapes, "/".join(kinds)))),
                    time_ms,
                    calls,
                    is_operator=True,
                    achieved=achieved,
                    of_attainable=None if least_ms is None else least_ms * calls / time_ms,
                )
            )
    return sorted(rows, key=lambda row: (-row.time_ms, row.name))[:MOST_OPERATORS]


def _work(key: "WorkKey", hardware: Hardware | None, call_ms: float) -> tuple[str, float | None]:
    """'412 TFLOP/s' or '2,100 GB/s' of a call, and the least time of one; '' and None if not known."""
    shapes = [
        [int(size) for size in shape.split("x")]
        for shape in key.shapes.split(", ")
        if re.fullmatch(r"[\dx]+", shape)
    ]
    types = key.types.split(", ")
    if not shapes or len(types) != len(shapes) or not all(kind in BYTES for kind in types):
        return "", None
    operator = key.operator.rpartition("::")[2]
    if operator == "_scaled_mm":  # what follows its matrices are their scales
        shapes, types = shapes[:2], types[:2]
    flops = _flops(operator, shapes)
    if flops:
        kind = types[-1]
        rates = {} if hardware is None else hardware.compute.sustained_flops
        least_ms = 1e3 * flops / rates[kind] if kind in rates else None
        return f"{number(flops / call_ms / 1e9)} TFLOP/s", least_ms
    size = _bytes(operator, shapes, types, key.repeated.split(", "))
    if not size:
        return "", None
    least_ms = None
    if (
        hardware is not None and key.kind == "kernel" and size > hardware.memory.l2_bytes
    ):  # smaller ones may be in the cache
        least_ms = 1e3 * size / hardware.memory.sustained_hbm_bytes_per_s
    return f"{number(size / call_ms / 1e6)} GB/s", least_ms


def _flops(name: str, shapes: list[list[int]]) -> float:
    """Of a product of matrices, or of attention, half of whose scores are counted since it may be causal."""
    if _PRODUCT.fullmatch(name):
        a, b = [shape for shape in shapes if len(shape) == (3 if "bmm" in name else 2)][-2:] or [[], []]
        return 2.0 * prod(a) * b[-1] if a and b and a[-1] == b[-2] else 0.0
    is_backward = _ATTENTION_BACKWARD.fullmatch(name) is not None
    if not is_backward and not _ATTENTION.fullmatch(name):
        return 0.0
    queries, keys = [shape for shape in shapes if len(shape) == 4][is_backward:][:2] or [[], []]
    if len(queries) != 4 or len(keys) != 4:
        return 0.0
    # (batch, heads, length, width) of scaled_dot_product and cuDNN; the others have heads behind the length.
    length = 2 if name.startswith(("_scaled", "_cudnn")) else 1
    return (2.5 if is_backward else 1.0) * 2.0 * prod(queries) * keys[length]


def _bytes(name: str, shapes: list[list[int]], types: list[str], repeated: list[str]) -> float:
    sizes = [prod(shape) * BYTES[kind] for shape, kind in zip(shapes, types, strict=True)]
    read = [
        0 if place < len(repeated) and repeated[place] == "1" else size for place, size in enumerate(sizes)
    ]
    if _IN_AND_OUT.fullmatch(name):
        return float(sum(read) + max(sizes))
    return float(sum(read)) if _INPUTS.fullmatch(name) else 0.0
