"""One trace beside one rank's lines: matches kernels to records, and makes lines of the trace's source.

windows.py and command.py call read_lines, whole_steps, coverage_of, kernel_lines and append_lines, in this
order.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median_low

import msgspec

from aorta.errors import RecordError
from aorta.records.files import steps_name
from aorta.records.reader import read_steps
from aorta.records.schema import CollectiveRecord, StepRecord
from aorta.records.writer import LineWriter
from aorta.steps.kernel_steps import kernel_op
from aorta.steps.record import partial_record
from aorta.timeline.collective import algbw_gb_s, busbw_gb_s
from aorta.timeline.overlap import window_fields
from aorta.timeline.types import Source, Timeline
from aorta.traces.model import NS_PER_MS, RankTrace, TraceCollective

_OF_RUN = (
    "epoch", "step", "loss", "lr", "grad_norm", "tokens", "start_unix_ns", "clock_error_us", "step_ms",
    "between_steps_ms", "host_ms", "num_collectives", "run_id", "attempt", "rollbacks",
)  # fmt: skip
"""Fields of a line that the run itself knows."""
_MARGIN_NS = 1_000_000
"""How far a step may lie outside the trace's first and last activity."""


@dataclass(frozen=True)
class RankLines:
    """A rank's file of lines: those of the run itself, and which others it has from traces."""

    path: Path
    steps: dict[int, StepRecord]
    """Global step -> line of source events, or host on a CPU."""
    present: set[tuple[int, Source]]
    """(global step, source) of every line."""


class Match(msgspec.Struct, frozen=True, kw_only=True):
    """One record and its kernel; times in ms since the trace's origin."""

    step: int
    place: int
    """Index of the call in the step's list of collectives."""
    kernel_start_ms: float
    kernel_end_ms: float


class Coverage(msgspec.Struct, frozen=True, kw_only=True):
    matched: list[Match]
    records_without_kernel: list[str]
    kernels_without_record: list[str]


def read_lines(output_dir: Path | str, rank: int, faults: list[str] | None = None) -> RankLines:
    """The rank's lines; RecordError where the file cannot be read, or is another rank's.

    faults: told what is damaged or missing, and what is left is read; else that is a RecordError.
    """
    path = Path(output_dir) / steps_name(rank)
    steps: dict[int, StepRecord] = {}
    present: set[tuple[int, Source]] = set()
    for record in read_steps(path, [] if faults is None else faults, left_out=faults):
        if record.rank != rank:
            raise RecordError(f"{path} holds lines of rank {record.rank}")
        present.add((record.global_step, record.source))
        if record.source in ("events", "host"):
            steps[record.global_step] = record
    return RankLines(path, steps, present)


def whole_steps(trace: RankTrace, steps: dict[int, StepRecord]) -> list[StepRecord]:
    """The lines of the steps that lie in the trace.

    By the trace's own marks where it has some, else by time. The last marked step is left out: its work may
    not all have run when the trace ended.
    """
    if trace.steps:
        marked = [t.step for t in trace.steps[:-1] if t.step not in trace.quality.truncated_steps]
        return [steps[step] for step in marked if step is not None and step in steps]
    origin_ns = trace.timeline.origin_unix_ns
    first, last = (origin_ns + round(ms * NS_PER_MS) for ms in trace.timeline.window_ms)
    return [
        row
        for row in steps.values()
        if row.step_ms is not None
        and row.start_unix_ns >= first - _MARGIN_NS
        and row.end_unix_ns <= last + _MARGIN_NS
    ]


def kernel_lines(trace: RankTrace, rows: Sequence[StepRecord], coverage: Coverage) -> list[StepRecord]:
    """Lines of the trace's source for the steps of these rows."""
    by_step: dict[int, list[Match]] = {}
    for match in coverage.matched:
        by_step.setdefault(match.step, []).append(match)
    return [_line(trace, row, by_step.get(row.global_step, [])) for row in rows if row.step_ms is not None]


def _line(trace: RankTrace, row: StepRecord, matches: list[Match]) -> StepRecord:
    window = _from_zero(trace.window(row.start_unix_ns, row.end_unix_ns), row.start_unix_ns)
    collectives = _collectives(trace, row, matches)
    not_measured = dict.fromkeys(
        ("memory", "device"), "not a matter of kernels; the line of the run's own source has it"
    )
    inherited = ("loss", "lr", "grad_norm", "tokens", "collectives")
    not_measured |= {name: row.not_measured[name] for name in inherited if name in row.not_measured}
    if collectives is not None and len(collectives) < row.num_collectives:
        not_measured["collectives"] = (
            f"{row.num_collectives - len(collectives)} of {row.num_collectives} have no kernel in the trace"
        )
    return partial_record(
        row.rank,
        row.world_size,
        row.global_step,
        **{name: getattr(row, name) for name in _OF_RUN},
        **window_fields(window),
        source=trace.source,
        collectives=collectives,
        not_measured=not_measured,
    )


def _from_zero(window: Timeline, start_unix_ns: int) -> Timeline:
    """The same timeline with times from the start of the window."""
    start_ms = (start_unix_ns - window.origin_unix_ns) / NS_PER_MS
    return replace(
        window,
        origin_unix_ns=start_unix_ns,
        window_ms=(0.0, window.window_ms[1] - start_ms),
        start_ms=window.start_ms - start_ms,
        end_ms=window.end_ms - start_ms,
    )


def _collectives(
    trace: RankTrace, row: StepRecord, matches: Iterable[Match]
) -> list[CollectiveRecord] | None:
    """The row's collectives with the times of their kernels; those without one are left out."""
    if row.collectives is None:
        return None
    # Matches give times relative to the trace, rows relative to their own start.
    offset_ms = (row.start_unix_ns - trace.timeline.origin_unix_ns) / NS_PER_MS
    collectives = []
    for match in sorted(matches, key=lambda match: match.place):
        call = row.collectives[match.place]
        duration_ms = match.kernel_end_ms - match.kernel_start_ms
        size = call.bytes  # a barrier moves nothing and has no bandwidth
        collectives.append(
            msgspec.structs.replace(
                call,
                start_ms=match.kernel_start_ms - offset_ms,
                start_by=None,
                end_ms=match.kernel_end_ms - offset_ms,
                algbw_gb_s=algbw_gb_s(size, duration_ms) if size else None,
                busbw_gb_s=busbw_gb_s(call.op, size, len(call.ranks), duration_ms) if size else None,
            )
        )
    return collectives


def append_lines(lines: RankLines, new: Iterable[StepRecord]) -> int:
    """Add the lines that the rank's file does not have yet; returns their number.

    RecordError where the file cannot be opened.
    """
    with LineWriter.append(lines.path) as writer:
        for line in new:
            if (line.global_step, line.source) not in lines.present and writer.write(line):
                lines.present.add((line.global_step, line.source))
        return writer.num_written


# -- matching records and kernels ----------------------------------------------------------------------


def coverage_of(trace: RankTrace, rows: Sequence[StepRecord]) -> Coverage:
    """How the rows' collectives and the trace's kernels fit together.

    Empty where steps were recorded without their collectives.
    """
    if any(row.collectives is None for row in rows):
        rows = []
    return match_kernels(rows, _named_by_records(trace, rows))


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
            if inside and len(call.ranks) > 1 and call.stream != "host":
                expected[kernel_op(call.op)].append((record, place, call))
    kernels_by_op: dict[str, list[TraceCollective]] = defaultdict(list)
    for kernel in trace.collectives:
        if first_ms < kernel.end_ms <= last_ms:
            kernels_by_op[kernel_op(kernel.op)].append(kernel)

    matched: list[Match] = []
    lone_records: list[str] = []
    lone_kernels: list[str] = []
    for op in sorted(expected.keys() | kernels_by_op.keys()):
        calls = sorted(expected[op], key=lambda row: row[0].start_unix_ns / 1e6 + (row[2].end_ms or 0.0))
        kernels = sorted(kernels_by_op[op], key=lambda kernel: kernel.end_ms)
        matched += [
            Match(
                step=record.global_step,
                place=place,
                kernel_start_ms=kernel.start_ms,
                kernel_end_ms=kernel.end_ms,
            )
            for (record, place, _), kernel in zip(calls, kernels, strict=False)
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


def _named_by_records(trace: RankTrace, rows: Sequence[StepRecord]) -> RankTrace:
    """The trace with operations taken from the records, where its kernels have one name for all operations.

    RCCL's do (ncclDevKernel_Generic). Kernels and records are put side by side in the order in which they
    ended, if there are as many of them; else nothing is guessed.
    """
    ends = sorted(
        (row.start_unix_ns + call.end_ms * NS_PER_MS, call.op)
        for row in rows
        for call in row.collectives or ()
        if call.end_ms is not None and len(call.ranks) > 1 and call.stream != "host"
    )
    if not ends:
        return trace
    first_ns, last_ns = rows[0].start_unix_ns, rows[-1].end_unix_ns
    origin_ns = trace.timeline.origin_unix_ns
    inside = [
        index
        for index, kernel in enumerate(trace.collectives)
        if first_ns < origin_ns + kernel.end_ms * NS_PER_MS <= last_ns
    ]
    ends = [(end_ns, op) for end_ns, op in ends if first_ns < end_ns <= last_ns]
    if len(ends) != len(inside) or any(trace.collectives[i].op != "unknown" for i in inside):
        return trace
    named = list(trace.collectives)
    inside.sort(key=lambda index: named[index].end_ms)
    for index, (_, op) in zip(inside, ends, strict=True):
        named[index] = msgspec.structs.replace(named[index], op=op)
    return replace(trace, collectives=named)


# -- the trace's clock ---------------------------------------------------------------------------------


def shifted(trace: RankTrace, shift_ns: int) -> RankTrace:
    """The same trace on another clock."""
    if shift_ns == 0:
        return trace

    def move(line: Timeline) -> Timeline:
        return replace(line, origin_unix_ns=line.origin_unix_ns + shift_ns)

    collectives = [
        collective
        if collective.launch_unix_ns is None
        else msgspec.structs.replace(collective, launch_unix_ns=collective.launch_unix_ns + shift_ns)
        for collective in trace.collectives
    ]
    return replace(
        trace, timeline=move(trace.timeline), steps=[move(s) for s in trace.steps], collectives=collectives
    )


def shift_by_steps(trace: RankTrace, steps: dict[int, StepRecord]) -> int | None:
    """ns that bring the trace's steps onto the lines' (median); None where it marks none of them."""
    differences = [
        steps[line.step].start_unix_ns - line.origin_unix_ns - round(line.window_ms[0] * NS_PER_MS)
        for line in trace.steps
        if line.step is not None and line.step in steps
    ]
    return median_low(differences) if differences else None
