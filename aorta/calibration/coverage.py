"""Does every communication kernel of a trace belong to exactly one record?

The mapping: a record of a group of more than one rank has one kernel (a coalesced group too:
NCCL launches it as one); a group of one rank has none. Within an operation, records and kernels
are matched in the order in which they ended. What is left on either side is listed, not explained
away.
"""

from collections import defaultdict
from collections.abc import Iterable

import msgspec

from aorta.records.schema import CollectiveRecord, StepRecord
from aorta.steps.calibration import CallError, TracedStep
from aorta.traces.model import RankTrace, TraceCollective

_HOST_ONLY = "host"


class Match(msgspec.Struct, frozen=True, kw_only=True):
    """One record and its kernel; times in ms on the Unix clock relative to the trace's origin."""

    step: int
    place: int
    """Of the call in the step's list of collectives."""
    op: str
    stream: str
    is_async: bool
    bytes: int | None
    launch_ms: float | None
    record_start_ms: float | None
    record_end_ms: float | None
    kernel_start_ms: float
    kernel_end_ms: float


class Coverage(msgspec.Struct, frozen=True, kw_only=True):
    matched: list[Match]
    records_without_kernel: list[str]
    kernels_without_record: list[str]

    @property
    def complete(self) -> bool:
        return not self.records_without_kernel and not self.kernels_without_record


def match_kernels(records: Iterable[StepRecord], trace: RankTrace) -> Coverage:
    """Match the collectives that ended within the windows of these steps.

    records: consecutive steps that the trace has whole, with their lists of collectives, and the
    step after them if there is one (a collective belongs where it ended). By operation and in the
    order of their ends, so one missing on either side shows as a leftover.
    """
    rows = sorted(records, key=lambda record: record.start_unix_ns)
    if not rows:
        return Coverage(matched=[], records_without_kernel=[], kernels_without_record=[])
    origin_ns = trace.timeline.origin_unix_ns
    first_ms = (rows[0].start_unix_ns - origin_ns) / 1e6
    last_ms = (rows[-1].start_unix_ns - origin_ns) / 1e6 + (rows[-1].step_ms or 0.0)
    expected: dict[str, list[tuple[StepRecord, int, CollectiveRecord]]] = defaultdict(list)
    for record in rows:
        offset_ms = (record.start_unix_ns - origin_ns) / 1e6
        for place, call in enumerate(record.collectives or ()):
            inside = call.end_ms is None or first_ms < offset_ms + call.end_ms <= last_ms
            if inside and len(call.ranks) > 1 and call.stream != _HOST_ONLY:
                expected[_kernel_op(call.op)].append((record, place, call))
    kernels_by_op: dict[str, list[TraceCollective]] = defaultdict(list)
    for kernel in trace.collectives:
        if first_ms < kernel.end_ms <= last_ms:
            kernels_by_op[_kernel_op(kernel.op)].append(kernel)

    matched: list[Match] = []
    lone_records: list[str] = []
    lone_kernels: list[str] = []
    for op in sorted(expected.keys() | kernels_by_op.keys()):
        calls = sorted(expected[op], key=lambda row: _end_unix_ms(row[0], row[2]))
        kernels = sorted(kernels_by_op[op], key=lambda kernel: kernel.end_ms)
        matched += [
            _match(record, place, call, kernel, trace)
            for (record, place, call), kernel in zip(calls, kernels, strict=False)
        ]
        lone_records += [
            f"step {record.global_step}: {call.op} #{call.seq} of group {call.group}, {call.bytes} bytes"
            for record, _, call in calls[len(kernels) :]
        ]
        lone_kernels += [
            f"at {kernel.end_ms:.3f} ms of the trace: {kernel.kernel} ({op})"
            for kernel in kernels[len(calls) :]
        ]
    return Coverage(matched=matched, records_without_kernel=lone_records, kernels_without_record=lone_kernels)


def traced_steps(records: Iterable[StepRecord], trace: RankTrace, coverage: Coverage) -> list[TracedStep]:
    """The steps with their kernels and what `coverage` matched in them: what a calibration learns from."""
    errors: dict[int, list[CallError]] = defaultdict(list)
    for match in coverage.matched:
        if match.record_start_ms is not None and match.record_end_ms is not None:
            start_ms = match.kernel_start_ms - match.record_start_ms
            errors[match.step].append(
                CallError(match.place, start_ms, match.kernel_end_ms - match.record_end_ms)
            )
    return [
        TracedStep(
            record,
            trace.window(record.start_unix_ns, record.end_unix_ns),
            errors[record.global_step],
        )
        for record in records
    ]


def _end_unix_ms(record: StepRecord, call: CollectiveRecord) -> float:
    return record.start_unix_ns / 1e6 + (call.end_ms or 0.0)


_SAME_KERNEL = {"barrier": "all_reduce", "all_to_all": "send_recv", "send": "send_recv", "recv": "send_recv"}
"""NCCL runs a barrier as an all-reduce of one element, and an all-to-all as sends and receives."""


def _kernel_op(op: str) -> str:
    return _SAME_KERNEL.get(op, op)


def _match(
    record: StepRecord, place: int, call: CollectiveRecord, kernel: TraceCollective, trace: RankTrace
) -> Match:
    offset_ms = (record.start_unix_ns - trace.timeline.origin_unix_ns) / 1e6
    return Match(
        step=record.global_step,
        place=place,
        op=call.op,
        stream=call.stream,
        is_async=call.is_async,
        bytes=call.bytes,
        launch_ms=None if call.launch_ms is None else offset_ms + call.launch_ms,
        record_start_ms=None if call.start_ms is None else offset_ms + call.start_ms,
        record_end_ms=None if call.end_ms is None else offset_ms + call.end_ms,
        kernel_start_ms=kernel.start_ms,
        kernel_end_ms=kernel.end_ms,
    )
