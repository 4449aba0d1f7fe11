"""Traces as runs of a report: one rank after another is reduced to its numbers, then the ranks are put
side by side.

Step windows hold all work that ran in them, whoever launched it; a step's list of collectives holds those
that it launched.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from aorta.account.load.assemble import RunFiles, assemble
from aorta.account.load.evidence import comm_evidence
from aorta.account.load.traces.reduce import RankSummary, kernels_of, records_of, reduce_ranks
from aorta.account.load.traces.steps import NOT_IN_TRACE, OF_KIND
from aorta.account.load.waits import (
    RankWaits,
    StepWaits,
    add_waits,
    add_waits_of_kinds,
    arrivals,
    last_to_arrive,
)
from aorta.account.metrics import of_operation
from aorta.account.model import Arrivals, CollectiveKind, Progress, Run
from aorta.account.numbers import number
from aorta.errors import TraceError
from aorta.records.schema import RunRecord
from aorta.timeline.intervals import clip, length_ms
from aorta.timeline.matching import RankCalls
from aorta.timeline.waits import RankView, exposed_waiting, match_ranks
from aorta.traces.inventory import rank_inventory
from aorta.traces.model import NS_PER_MS
from aorta.traces.quality import verdict_of_ranks
from aorta.traces.sources import Source, map_ranks, open_source, ranks_text
from aorta.traces.steps import Reading, StepRule

EARLIEST_UNIX_NS = 10**18
"""September 2001: earlier times are of a clock that began with the machine or the trace."""
LONGEST_APART_NS = 3_600_000_000_000
"""Between ranks of one run; clocks of machines differ by less."""


def load_traces(
    path: Path | str | Sequence[Path],
    label: str,
    *,
    jobs: int | None = 1,
    dask: str | None = None,
    progress: Progress | None = None,
    reading: Reading = Reading(),  # noqa: B008 (frozen)
) -> Run:
    """The run whose traces are at path. TraceError or ReportError in one line where it cannot be used.

    Without step markers, and where nothing repeats clearly, the whole window is one step. A trace of several
    devices that is there alone is a rank per device. not_measured["collectives.bytes"] tells where sizes are
    not known.
    """
    source = open_source(path)
    reduce = partial(reduce_ranks, label=label, jobs=jobs, dask=dask, progress=progress)
    summaries = list(reduce(source, reading=reading))
    if len(summaries) == 1 and len(summaries[0].devices) > 1:
        source = source.by_device(summaries[0].devices)
        summaries = list(reduce(source, reading=reading))
    notes: list[str] = []
    unmarked = [summary.rank for summary in summaries if not summary.facts.steps]
    if unmarked and len(unmarked) < len(summaries):
        notes.append(
            f"warning: rank {ranks_text(unmarked)} marks no steps while others do: the whole window of each"
            " rank counts as one step"
        )
        reading = replace(reading, steps=StepRule(is_off=True))
        summaries = list(reduce(source, reading=reading))
    num_ranks = max(source.num_ranks, *(summary.world_size or 1 for summary in summaries))
    are_all = num_ranks <= len(summaries)
    if not are_all:
        notes.append(
            f"{len(summaries)} of {num_ranks} ranks: waiting for the others is not split from transfer"
        )
    _check_times(source, summaries)
    # Groups that lack a rank have no waits.
    view = match_ranks([summary.calls for summary in summaries], are_all=are_all)
    between_ranks = rank_notes(view, are_all)
    run = run_of_summaries(source, label, summaries, reading)
    add_waits_of_traces(run, summaries, view)
    possible = Counter[str]()
    for summary in summaries:
        possible.update(summary.possible_comm_ms)
    run = msgspec.structs.replace(
        run,
        possible_comm_ms={name: ms / len(summaries) for name, ms in possible.most_common()},
        updates=any(summary.updates for summary in summaries),
        arrivals=arrivals_of_traces(run, summaries, view),
        clock_offset_ns=view.clock.moved_ns,
        clock_residual_us=view.clock.residual_us,
        kernels=partial(kernels_of, source, reading),
        inventories=[*map_ranks(partial(rank_inventory, reading=reading), source, jobs=jobs)]
        if reading.operators
        else [],
    )
    run.notes[:0] = [*source.notes, *notes, *trace_notes(summaries), *between_ranks]
    if unsure := comm_evidence(run).note:
        run.notes.insert(0, f"warning: {unsure}")
    return run


def _check_times(source: Source, summaries: Sequence[RankSummary]) -> None:
    """Ranks of one run run at the same time. Clocks of boots tell nothing of that."""
    ranks = [rank_facts.facts for rank_facts in summaries]
    if len(ranks) < 2 or min(rank_facts.start_unix_ns for rank_facts in ranks) < EARLIEST_UNIX_NS:
        return
    last, first = (
        max(ranks, key=lambda rank_facts: rank_facts.start_unix_ns),
        min(ranks, key=lambda rank_facts: rank_facts.end_unix_ns),
    )
    apart_ns = last.start_unix_ns - first.end_unix_ns
    if apart_ns > LONGEST_APART_NS:
        raise TraceError(
            f"{source.path} mixes runs: rank {last.rank} starts {apart_ns / 3.6e12:.1f} hours after rank"
            f" {first.rank} has ended; keep one run in a folder"
        )


def run_of_summaries(source: Source, label: str, summaries: Sequence[RankSummary], reading: Reading) -> Run:
    """The steps of the ranks side by side; waits are not known yet."""
    if not summaries:
        raise TraceError(f"{source.path} holds no rank")
    world_size = source.world_size or len(source.ranks)
    largest_group = max(summary.world_size or 1 for summary in summaries)
    run = assemble(
        RunFiles(
            source.path,
            label,
            [summary.columns for summary in summaries],
            _run_record(summaries, max(world_size, largest_group)),
            records=partial(records_of, source, world_size, reading),
            totals={summary.rank: _totals(summary) for summary in summaries},
        ),
        [],
    )
    return _without_unknown_sizes(run, summaries)


def _totals(summary: RankSummary) -> dict[str, float | int | None]:
    totals: dict[str, float | int | None] = msgspec.structs.asdict(summary.sums)
    return totals | dict.fromkeys((name for kind in summary.untimed for name in OF_KIND[kind]), None)


def _run_record(summaries: Sequence[RankSummary], world_size: int) -> RunRecord:
    """Facts that traces give about a run: devices and versions, and no configuration."""
    missing = (
        "command",
        "config",
        "model",
        "layout",
        "environment",
        "clock_anchors",
        "coverage",
        "placement",
    )
    return RunRecord(
        started_unix_ns=min(summary.facts.start_unix_ns for summary in summaries),
        finished_unix_ns=max(summary.facts.end_unix_ns for summary in summaries),
        world_size=world_size,
        command=[],
        config=None,
        model=None,
        layout=None,
        versions=dict(summaries[0].versions),
        devices=[
            {"name": summary.device, "host": summary.host}
            for summary in summaries
            if summary.device is not None
        ],
        environment={},
        clock_anchors=[],
        coverage={},
        placement=None,
        not_measured=dict.fromkeys(missing, NOT_IN_TRACE),
    )


def _without_unknown_sizes(run: Run, summaries: Sequence[RankSummary]) -> Run:
    """Bytes and bandwidth are not known where any collective of the operation has no size."""
    unknown = {
        op
        for summary in summaries
        for op, size in zip(summary.calls.op, summary.calls.size_bytes, strict=True)
        if size is None
    }
    for op in unknown:
        for name in (of_operation("bytes", op), of_operation("busbw_gb_s", op)):
            if name in run.metrics:
                run.metrics[name][:] = np.nan
    alone = {
        op
        for summary in summaries
        for op, key in zip(summary.calls.op, summary.calls.group, strict=True)
        if key.ranks is None
    }
    for op in alone:
        if (name := of_operation("busbw_gb_s", op)) in run.metrics:
            run.metrics[name][:] = np.nan
    return run


# -- waits: collectives are matched by order -----------------------------------------------------------


def add_waits_of_traces(run: Run, summaries: Sequence[RankSummary], view: RankView) -> None:
    """Adds exposed_wait_ms, and waits and transfers per operation and kind of collective.

    Nothing is added for a rank and step with a collective between ranks that was not matched."""
    if len(run.ranks) < 2:
        return
    place = {int(step): i for i, step in enumerate(run.global_step)}
    exposed_wait = np.full((len(run.ranks), run.num_steps), np.nan)
    step_waits = []
    for r, (summary, waits) in enumerate(zip(summaries, view.waits, strict=True)):
        calls = summary.calls
        unknown = np.isnan(waits.wait_ms)
        start_ms, end_ms = ((ns - calls.origin_ns) / NS_PER_MS for ns in (calls.start_ns, calls.end_ns))
        waiting = exposed_waiting(
            start_ms[~unknown], (start_ms + waits.wait_ms)[~unknown], end_ms[~unknown], calls.exposed
        )
        for step, window in summary.windows.items():
            if step in place and not unknown[(start_ms < window[1]) & (end_ms > window[0])].any():
                exposed_wait[r, place[step]] = length_ms(clip(waiting, *window))
        column = np.array([place.get(step, -1) for step in summary.step_of_call.tolist()], dtype=np.int64)
        step_waits.append(StepWaits(np.array(calls.op, dtype=str), column, waits))
    if np.isfinite(exposed_wait).any():
        run.metrics["exposed_wait_ms"] = exposed_wait
    add_waits(run.metrics, step_waits, run.num_steps)
    detailed = {int(step): i for i, step in enumerate(run.global_step[run.has_collectives])}
    for r, (summary, waits) in enumerate(zip(summaries, view.waits, strict=True)):
        column = np.array([detailed.get(step, -1) for step in summary.step_of_call.tolist()], dtype=np.int64)
        add_waits_of_kinds(
            [(kind, _is_of(kind, summary.calls)) for kind in run.collectives], r, column, waits
        )


def _is_of(kind: CollectiveKind, calls: RankCalls) -> NDArray[np.bool_]:
    """[call]: as far as the trace tells, it is of this kind."""
    belongs = [
        op == kind.op
        and (kind.bytes is None or size == kind.bytes)
        and (kind.num_ranks is None or key.ranks is None or len(key.ranks) == kind.num_ranks)
        for op, size, key in zip(calls.op, calls.size_bytes, calls.group, strict=True)
    ]
    return np.array(belongs, dtype=bool)


def arrivals_of_traces(run: Run, summaries: Sequence[RankSummary], view: RankView) -> Arrivals | None:
    """None where no collective was matched."""
    if len(run.ranks) < 2 or not any(view.num_matched):
        return None
    place = {int(step): i for i, step in enumerate(run.global_step)}
    of_ranks = [
        RankWaits(
            start_ns=summary.calls.start_ns,
            column=np.array([place.get(step, -1) for step in summary.step_of_call.tolist()], dtype=np.int64),
            num_ranks=np.array(
                [len(key.ranks or ()) or len(run.ranks) for key in summary.calls.group], dtype=np.int64
            ),
            wait_ms=waits.wait_ms,
            late_rank=waits.late_rank,
        )
        for summary, waits in zip(summaries, view.waits, strict=True)
    ]
    return arrivals(run.ranks, of_ranks, run.num_steps)


# -- notes on gaps, clocks, who came last ---------------------------------------------------------------


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
