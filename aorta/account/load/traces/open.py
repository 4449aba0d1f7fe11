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

from aorta.account.load.assemble import RunFiles, assemble
from aorta.account.load.evidence import comm_evidence
from aorta.account.load.traces.reduce import RankSummary, kernels_of, records_of, reduce_ranks
from aorta.account.load.traces.steps import NOT_IN_TRACE, OF_KIND
from aorta.account.load.waits import last_to_arrive
from aorta.account.metrics import of_operation
from aorta.account.model import Progress, Run
from aorta.account.numbers import number
from aorta.errors import TraceError
from aorta.records.schema import NOTHING_NOTED, RunRecord
from aorta.timeline.matching import UNKNOWN_SIZE, RankCalls
from aorta.timeline.types import Source as RecordSource
from aorta.timeline.waits import RankView, match_ranks
from aorta.traces.inventory import rank_inventory
from aorta.traces.model import NS_PER_MS
from aorta.traces.quality import Finding, verdict_of_ranks
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
    run = run_of_summaries(source, label, summaries, reading, are_all)
    possible = Counter[str]()
    for summary in summaries:
        possible.update(summary.possible_comm_ms)
    optimizer_ns = sum((summary.optimizer_ns for summary in summaries), Counter[str]())
    inventory = partial(rank_inventory, reading=reading)
    run = msgspec.structs.replace(
        run,
        possible_comm_ms={name: ms / len(summaries) for name, ms in possible.most_common()},
        updates=any(summary.updates for summary in summaries),
        libraries=frozenset().union(*(summary.libraries for summary in summaries)),
        optimizers=tuple(name for name, _ in optimizer_ns.most_common()),
        kernels=partial(kernels_of, source, reading),
        inventories=[*map_ranks(inventory, source, jobs=jobs)] if reading.operators else [],
    )
    run.notes[:0] = [*source.notes, *notes, *trace_notes(summaries)]
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


def run_of_summaries(
    source: Source, label: str, summaries: Sequence[RankSummary], reading: Reading, are_all: bool
) -> Run:
    """The steps of the ranks side by side. are_all: there are no other ranks."""
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
            match=partial(_match, are_all),
        ),
        [],
    )
    return _without_unknown_sizes(run, summaries)


def _totals(summary: RankSummary) -> dict[str, float | int | None]:
    totals: dict[str, float | int | None] = msgspec.structs.asdict(summary.sums)
    return totals | dict.fromkeys((name for kind in summary.untimed for name in OF_KIND[kind]), None)


def _run_record(summaries: Sequence[RankSummary], world_size: int) -> RunRecord:
    """Facts that traces give about a run: devices and versions, and no configuration."""
    of_a_run = ("config", "model", "layout", "environment", "clock_anchors", "coverage", "placement")
    return msgspec.structs.replace(
        NOTHING_NOTED,
        started_unix_ns=min(summary.facts.start_unix_ns for summary in summaries),
        finished_unix_ns=max(summary.facts.end_unix_ns for summary in summaries),
        world_size=world_size,
        versions=dict(summaries[0].versions),
        devices=[
            {"name": summary.device, "host": summary.host}
            for summary in summaries
            if summary.device is not None
        ],
        not_measured=dict.fromkeys(("command", *of_a_run), NOT_IN_TRACE),
    )


def _match(are_all: bool, _source: RecordSource, ranks: list[int], calls: list[RankCalls]) -> RankView:
    """Collectives matched by their order, with notes for a reader. Groups that lack a rank have no waits."""
    view = match_ranks(ranks, calls, are_all=are_all)
    return replace(view, notes=rank_notes(view, are_all))


def _without_unknown_sizes(run: Run, summaries: Sequence[RankSummary]) -> Run:
    """Bytes are not known where any collective of the operation has no size, and bandwidth is neither there
    nor where ranks of a group are not told."""
    for op, size, _, num_ranks, _ in (kind for summary in summaries for kind in summary.calls.kinds):
        for name, is_known in (
            ("bytes", size != UNKNOWN_SIZE),
            ("busbw_gb_s", size != UNKNOWN_SIZE and num_ranks),
        ):
            if not is_known and of_operation(name, op) in run.metrics:
                run.metrics[of_operation(name, op)][:] = np.nan
    return run


# -- notes on gaps, clocks, who came last ---------------------------------------------------------------


def trace_notes(summaries: Sequence[RankSummary]) -> list[str]:
    """Lines on gaps in the traces, one for the same finding of several ranks."""
    lines = [f"{f.severity}: {f.text}" for f in verdict_of_ranks([summary.facts for summary in summaries])]
    ranks_by_finding: dict[Finding, list[int]] = {}
    for summary in summaries:
        for finding in summary.findings:
            ranks_by_finding.setdefault(finding, []).append(summary.rank)
    for finding, ranks in sorted(ranks_by_finding.items(), key=lambda item: item[0].severity != "warning"):
        text = f"{finding.severity}: {finding.text}"
        lines.append(text if len(ranks) == len(summaries) else f"{text} (rank {ranks_text(ranks)})")
    cut = {step: reason for summary in summaries for step, reason in summary.truncated.items()}
    lines += [f"note: step {step} may be cut off: {reason}" for step, reason in sorted(cut.items())]
    if summaries and all(not summary.facts.steps for summary in summaries):
        lines.append("note: the trace marks no steps: the whole trace counts as one step")
    return lines


def rank_notes(view: RankView, are_all: bool) -> list[str]:
    """Clock, matching, and who came last. are_all: there are no other ranks, whose calls are missing."""
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
    if last := last_to_arrive(view):
        lines.append(f"note: {last}")
    return lines
