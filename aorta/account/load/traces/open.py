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

from aorta.account.load.evidence import comm_evidence
from aorta.account.load.traces.notes import rank_notes, ranks_text, trace_notes
from aorta.account.load.traces.reduce import RankSummary, kernels_of, reduce_ranks
from aorta.account.load.traces.run import run_of_summaries
from aorta.account.load.traces.waits import add_waits_of_traces, arrivals_of_traces
from aorta.account.model import Progress, Run
from aorta.errors import TraceError
from aorta.timeline.waits import match_ranks
from aorta.traces.inventory import rank_inventory
from aorta.traces.sources import Reading, Source, map_ranks, open_source
from aorta.traces.steps import StepRule

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
    rows = [(summary.calls, summary.step_of_call, summary.windows) for summary in summaries]
    add_waits_of_traces(run, rows, view)
    possible = Counter[str]()
    for summary in summaries:
        possible.update(summary.possible_comm_ms)
    run = msgspec.structs.replace(
        run,
        possible_comm_ms={name: ms / len(summaries) for name, ms in possible.most_common()},
        updates=any(summary.updates for summary in summaries),
        arrivals=arrivals_of_traces(run, rows, view),
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
