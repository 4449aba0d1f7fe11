"""The parts of a line without details that are longest, as whole numbers: of its kernels, of each operation,
and host spans.

`packed` writes what `unpack` reads. Times are in units of 0.1 µs, as exact as host spans are written in lines
with details.
"""

from itertools import chain, repeat
from typing import Any

import msgspec
from msgspec.structs import force_setattr

from aorta.records.schema import KERNEL_CLASSES, HostKind, HostSpan, KernelSums, Packed, StepRecord

PER_MS = 1e4
KINDS: tuple[HostKind, ...] = ("data", "backward", "optimizer", "synchronisation", "step")
"""Of host spans that step after step has, in their order. Where they are, a line with details tells."""


def packed(record: StepRecord) -> StepRecord:
    """The record as a line without details has it."""
    overlap, sums, spans = record.overlap, record.kernels, record.host_spans
    if spans is None:
        return record
    is_short = sums is not None and not sums.top and sums.spans is None
    operations = dict.fromkeys((*overlap.hidden_by_op, *overlap.exposed_by_op))
    hidden, exposed = overlap.hidden_by_op.get, overlap.exposed_by_op.get
    return msgspec.structs.replace(
        record,
        packed=Packed(
            _of_kernels(sums) if sums is not None and is_short else [],
            {op: (_units(hidden(op, 0.0)), _units(exposed(op, 0.0))) for op in operations},
            [_run([span for span in spans if span.kind == kind]) for kind in KINDS],
            [span.bytes for span in spans if span.kind == "optimizer"],
        ),
        kernels=None if is_short else sums,
        overlap=msgspec.structs.replace(overlap, hidden_by_op={}, exposed_by_op={}),
        host_spans=[span for span in spans if span.kind not in KINDS] or None,
    )


def unpack(record: Any) -> None:
    """Give a record that was just decoded, a StepRecord or a struct with these fields of one, its parts."""
    short: Packed | None = record.packed
    if short is None:
        return
    spans = list(record.host_spans or ())
    for kind, run in zip(KINDS, short.host_spans, strict=False):
        sizes = short.optimizer_bytes if kind == "optimizer" else ()
        end = 0
        for distance, length, size in zip(run[::2], run[1::2], chain(sizes, repeat(None)), strict=False):
            start = end + distance
            end = start + length
            spans.append(HostSpan(kind, start / PER_MS, end / PER_MS, "", size))
    overlap, operations = record.overlap, short.by_op.items()
    force_setattr(overlap, "hidden_by_op", {op: hidden / PER_MS for op, (hidden, _) in operations})
    force_setattr(overlap, "exposed_by_op", {op: exposed / PER_MS for op, (_, exposed) in operations})
    force_setattr(record, "host_spans", spans)
    if short.kernels:
        force_setattr(record, "kernels", _kernels(short.kernels))
    force_setattr(record, "packed", None)


def _units(ms: float) -> int:
    return round(ms * PER_MS)


def _run(spans: list[HostSpan]) -> list[int]:
    """Of each span its distance from the end of the one before, and its length."""
    numbers: list[int] = []
    last = 0
    for span in spans:
        start, end = _units(span.start_ms), _units(span.end_ms)
        numbers += (start - last, end - start)
        last = end
    return numbers


def _of_kernels(sums: KernelSums) -> list[int]:
    numbers = [sums.num_kernels, sums.num_graph_nodes]
    for name in KERNEL_CLASSES:
        ms, count = sums.classes.get(name, (0.0, 0))
        numbers += (_units(ms), count)
    return numbers


def _kernels(numbers: list[int]) -> KernelSums:
    num_kernels, num_graph_nodes, *rest = (*numbers, 0)[: max(2, len(numbers))]
    of_class = zip(KERNEL_CLASSES, rest[::2], rest[1::2], strict=False)
    classes = {name: (units / PER_MS, count) for name, units, count in of_class if count}
    return KernelSums(num_kernels=num_kernels, num_graph_nodes=num_graph_nodes, classes=classes)
