"""Faults and gaps of traces in words: of one rank (verdict), and of ranks side by side (verdict_of_ranks)."""

from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Literal, NamedTuple

from aorta.timeline.overlap import total
from aorta.timeline.types import Total
from aorta.traces.model import LeftOut, RankTrace, TraceQuality

Severity = Literal["warning", "note"]
FEW = 0.01
"""Share of launches without a kernel up to which the end of the trace explains them."""
MANY = 0.2
"""Share of launches without a kernel above which whole streams are missing, not single kernels."""
UNEQUAL = 1.5
"""Ratio of two ranks' numbers of kernels above which they are reported."""


class Finding(NamedTuple):
    """A line of a verdict."""

    severity: Severity
    """warning: numbers of this trace may be wrong. note: what a reader should know."""
    text: str


class RankFacts(NamedTuple):
    """Numbers of one rank that verdict_of_ranks compares."""

    rank: int
    num_kernels: int
    num_collectives: int
    start_unix_ns: int
    end_unix_ns: int
    steps: tuple[int, ...]


def verdict(trace: RankTrace, sums: Total | None = None) -> list[Finding]:
    """Findings of one rank, warnings first; empty where nothing is missing."""
    sums = sums or total(trace.timeline)
    findings = [*_lost(trace.quality, sums), *_clocks(trace.quality), *_classes(trace.quality, sums)]
    findings += [
        Finding("warning", f"{reason}: what needs them is not known") for reason in trace.untimed.values()
    ]
    findings += [
        Finding("warning" if isinstance(note, LeftOut) else "note", note) for note in trace.quality.notes
    ]
    return sorted(findings, key=lambda finding: finding.severity != "warning")


def _lost(q: TraceQuality, sums: Total) -> Iterator[Finding]:
    """Findings about activities that the trace lacks."""
    num_compute = (sums.num_kernels or 0) - sums.num_collectives
    if num_compute == 0 and sums.num_collectives:
        yield Finding(
            "warning",
            "there are collectives but no other kernel: the compute stream is missing"
            " (known of MI300X and MI350X with ROCm 7.0.1)",
        )
    if q.num_launches and q.num_launches_without_kernel:
        share = q.num_launches_without_kernel / q.num_launches
        lost = q.num_launches_without_kernel
        text = f"kernel launches without a kernel: {lost} of {q.num_launches}, {100 * share:.1f} %"
        if share > MANY:
            text += ": whole streams are missing (known of MI300X and MI350X with ROCm 7.0.1)"
        elif share > FEW:
            text += ": the profiler dropped some"
        else:
            text += ": dropped, or not finished when the trace ended"
        yield Finding("warning" if share > FEW else "note", text)
    if q.num_missing_dispatches:
        yield Finding(
            "warning",
            f"numbers missing from the sequence of dispatches: {q.num_missing_dispatches},"
            " filtered out or dropped",
        )
    if q.num_without_time:
        yield Finding("warning", f"activities without times, which are left out: {q.num_without_time}")
    if q.num_unlinked and q.num_launches is not None:
        yield Finding(
            "note",
            f"{q.num_unlinked} of {q.num_activities} activities have no launch in the trace: they count"
            " in total and in the windows that they ran in; no step counts their collectives as its own",
        )


def _clocks(q: TraceQuality) -> Iterator[Finding]:
    """Findings about times that contradict each other."""
    if q.num_before_launch:
        yield Finding(
            "warning" if q.worst_before_launch_us > 10 else "note",
            f"activities that start before their launch: {q.num_before_launch}, by up to"
            f" {q.worst_before_launch_us:.1f} µs; the clocks of host and device disagree",
        )
    if q.num_backwards:
        yield Finding("warning", f"activities that end before they start: {q.num_backwards}")


def _classes(q: TraceQuality, sums: Total) -> Iterator[Finding]:
    """Findings about activities that may count as something else than they are."""
    if q.num_unknown_collectives and q.unknown_comm_share is not None:
        yield Finding(
            "note",
            f"the operation of {q.num_unknown_collectives} of {sums.num_collectives} collectives"
            f" ({100 * q.unknown_comm_share:.1f} % of their time) is unknown",
        )
    if q.num_peer_copies:
        yield Finding(
            "note",
            "copies between devices that are tied to no collective count as copies:"
            f" {q.num_peer_copies}, {q.peer_copy_ms:.3f} ms; a rule can make them communication",
        )
    if q.num_copy_kernels:
        yield Finding(
            "note",
            f"kernels that only copy count as compute: {q.num_copy_kernels}, {q.copy_kernel_ms:.3f} ms",
        )
    if q.num_same_stream_overlaps:
        yield Finding(
            "note",
            "kernels that start before their predecessor on the stream has ended:"
            f" {q.num_same_stream_overlaps}",
        )


def truncated(trace: RankTrace) -> dict[int, str]:
    """Reasons for steps that the trace may have cut off. These are reported, not dropped."""
    reasons = {step: "launches without a kernel" for step in trace.quality.truncated_steps}
    steps = [line.step for line in trace.steps if line.step is not None]
    if steps:
        reasons.setdefault(steps[-1], "the last step of the trace")
        reasons.setdefault(steps[0], "the first step of the trace")
    return reasons


def facts(trace: RankTrace, sums: Total) -> RankFacts:
    """Numbers of one rank's trace for verdict_of_ranks."""
    origin = trace.timeline.origin_unix_ns
    return RankFacts(
        rank=trace.rank,
        num_kernels=sums.num_kernels or 0,
        num_collectives=sums.num_collectives,
        start_unix_ns=origin,
        end_unix_ns=origin + round(sums.span_ms * 1e6),
        steps=tuple(line.step for line in trace.steps if line.step is not None),
    )


def verdict_of_ranks(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    """Findings about ranks that do not fit together; empty where all fit."""
    if len(ranks) < 2:
        return
    fewest, largest = (
        min(ranks, key=attrgetter("num_collectives")),
        max(ranks, key=attrgetter("num_collectives")),
    )
    if fewest.num_collectives != largest.num_collectives:
        yield Finding(
            "warning" if fewest.num_collectives * UNEQUAL < largest.num_collectives else "note",
            f"ranks hold unequal numbers of collectives: rank {fewest.rank} {fewest.num_collectives},"
            f" rank {largest.rank} {largest.num_collectives}",
        )
    fewest, largest = min(ranks, key=attrgetter("num_kernels")), max(ranks, key=attrgetter("num_kernels"))
    if fewest.num_kernels * UNEQUAL < largest.num_kernels:
        yield Finding(
            "warning",
            f"ranks hold unequal numbers of kernels: rank {fewest.rank} {fewest.num_kernels},"
            f" rank {largest.rank} {largest.num_kernels}",
        )
    last = max(ranks, key=attrgetter("start_unix_ns"))
    first = min(ranks, key=attrgetter("end_unix_ns"))
    if last.start_unix_ns > first.end_unix_ns:
        yield Finding(
            "warning",
            f"rank {last.rank} starts after rank {first.rank} has ended: clocks differ, or these are"
            " windows of several runs",
        )
    common = set(ranks[0].steps).intersection(*(rank_facts.steps for rank_facts in ranks[1:]))
    all_steps = {step for rank_facts in ranks for step in rank_facts.steps}
    if common != all_steps:
        yield Finding(
            "note", f"{len(all_steps) - len(common)} of {len(all_steps)} steps are not on all ranks"
        )
