"""What a report says of its traces: gaps, clocks, who came last."""

from collections.abc import Sequence

import numpy as np

from aorta.account.load.traces.reduce import RankSummary
from aorta.account.load.waits import last_to_arrive
from aorta.account.numbers import number
from aorta.timeline.waits import RankView
from aorta.traces.model import NS_PER_MS
from aorta.traces.quality import verdict_of_ranks


def trace_notes(summaries: Sequence[RankSummary]) -> list[str]:
    """Lines on gaps in the traces, one for the same finding of several ranks."""
    lines = [f"{f.severity}: {f.text}" for f in verdict_of_ranks([summary.facts for summary in summaries])]
    by_text: dict[str, list[int]] = {}
    for summary in summaries:
        for finding in summary.findings:
            by_text.setdefault(f"{finding.severity}: {finding.text}", []).append(summary.rank)
    for text, ranks in sorted(by_text.items(), key=lambda item: not item[0].startswith("warning")):
        lines.append(text if len(ranks) == len(summaries) else f"{text} (rank {ranks_text(ranks)})")
    cut: dict[int, str] = {}
    for summary in summaries:
        cut.update(summary.truncated)
    lines += [f"note: step {step} may be cut off: {reason}" for step, reason in sorted(cut.items())]
    if summaries and all(not summary.facts.steps for summary in summaries):
        lines.append("note: the trace marks no steps: the whole trace counts as one step")
    return lines


def rank_notes(view: RankView, are_all: bool) -> list[str]:
    """Clock, matching, and who came last. are_all: there are no other ranks, whose calls are missing."""
    if len(view.ranks) < 2:
        return []
    lines = [f"note: {note}" for note in view.notes] if are_all else []
    clock = view.clock
    if clock.residual_us is not None:
        apart_ms = float(np.ptp(clock.offset_ns)) / NS_PER_MS
        moved = f"shifted by up to {number(apart_ms)} ms" if clock.offset_ns.any() else "unchanged"
        lines.append(
            f"note: clocks of ranks {moved}: ends of {clock.num_anchors} collectives agree within"
            f" {clock.residual_us:.1f} µs; a rank is called late only above that"
        )
    left = sum(view.num_left)
    if left and are_all:
        lines.append(f"note: collectives that were not found on all ranks of their group: {left}")
    if last := last_to_arrive(view.ranks, view.waits):
        lines.append(f"note: {last}")
    return lines


def ranks_text(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
