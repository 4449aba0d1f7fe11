"""What a report says of its traces: gaps, clocks, stragglers."""

from collections.abc import Sequence

import numpy as np

from aorta.account.load.rank.kernels import kernel_name
from aorta.account.load.traces.matched import MAX_DOING, MatchedTraces
from aorta.account.load.traces.reduce import RankSummary
from aorta.account.numbers import number
from aorta.timeline.waits import Doing
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


def rank_notes(matched: MatchedTraces, are_all: bool) -> list[str]:
    """Clock, matching and stragglers. are_all: there are no other ranks, whose calls are missing."""
    view = matched.view
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
    for late in matched.stragglers[:MAX_DOING]:
        text = f"rank {late.rank} arrived last in {late.num_late} of {late.num_judged} collectives"
        text += f" and cost the others {number(late.caused_ms)} ms of exposed waiting in total"
        late_doing = matched.doing.get(late.rank)
        lines.append(
            text + (f": {_doing_text(late_doing)}" if late_doing and late_doing.window_ms > 0 else "")
        )
    return lines


def _doing_text(late_doing: Doing) -> str:
    busy = ", ".join(f"{kernel_name(name)} {number(ms)} ms" for name, ms in late_doing.kernels)
    idle, window = number(late_doing.idle_ms), number(late_doing.window_ms)
    text = f"in the {window} ms before it arrived its compute stream was idle for {idle} ms"
    if late_doing.comm_ms > 0:
        text += f" ({number(late_doing.comm_ms)} ms of it in other collectives)"
    return f"{text} and ran {busy}" if busy else text


def ranks_text(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
