"""Makes the run of its ranks' rows: one table of numbers per source.

Files go by rank by rank; what stays is one float per rank, step and metric. Details of single steps are read
again when a picture or a page asks for them.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from aorta.account.load.collectives import collectives
from aorta.account.load.left_out import complete_alone, left_out_steps
from aorta.account.load.measures import add_measures, totals_of_ranks
from aorta.account.load.rank.columns import RankFile, RankSteps
from aorta.account.load.sides import RankRows, places_of
from aorta.account.load.waits import arrivals_of_records, match_calls, split_waits_of_records
from aorta.account.model import Run
from aorta.errors import ReportError
from aorta.records.schema import RunRecord, Source, StepRecord
from aorta.records.table import StepTable
from aorta.timeline.types import OWN_SOURCES

SOURCES: tuple[Source, ...] = ("kernels", "events", "host", "kineto", "rocprofv3", "nsys", "projected")
FEWEST_BY_KERNELS = 8
"""Steps timed by kernel records from which on they speak for a run: its others are profiled or not timed."""


@dataclass(frozen=True, slots=True)
class RunFiles:
    """What was read of a run."""

    path: Path
    label: str
    ranks: list[RankFile]
    """In order."""
    run: RunRecord | None
    records: Callable[[Source, int], Iterator[StepRecord]]
    """A rank's records of one source, read again."""
    columns: Callable[[Source, int], Iterator[StepTable]] | None = None
    """Their numbers, many records at a time."""
    totals: dict[int, dict[str, float | int | None]] | None = None
    """By rank; None where they are the sums of the steps."""
    rows: RankRows | None = None
    """None: those of ranks, which have their columns then."""
    matches: bool = True
    """Ranks are matched by their collectives."""


def assemble(files: RunFiles, notes: list[str]) -> Run:
    """The Run of the source with the most lines, the others beside it."""
    counts: Counter[Source] = Counter()
    rows = files.rows or RankRows.of(files.ranks)
    for rank in files.ranks:
        counts.update({source: len(steps.global_step) for source, steps in rank.sources.items()})
    runs: list[Run] = []
    for source in sorted(counts, key=lambda source: (_place(source, counts), SOURCES.index(source))):
        source_run = _one_source(files, rows, source)
        if source_run is None:
            notes.append(f"lines of source {source} are left out: no step has them from every rank")
        else:
            runs.append(source_run)
    if not runs:
        lines = ", ".join(
            f"rank {rank.rank} {sum(len(steps.global_step) for steps in rank.sources.values())}"
            for rank in files.ranks[:8]
        )
        raise ReportError(f"{files.path}: no step was recorded by every rank from one source ({lines} lines)")
    main, *other_runs = runs
    main.notes[:0] = notes
    main.other_sources.update({other_run.source: other_run for other_run in other_runs})
    return main


def _place(source: Source, counts: dict[Source, int]) -> int:
    """Sort key of a source within a run: most steps first, kernel records before events."""
    if source == "kernels" and counts[source] >= FEWEST_BY_KERNELS:
        return -sum(counts.values())
    return -counts[source]


def _one_source(files: RunFiles, rows: RankRows, source: Source) -> Run | None:
    """The run by one source; None where no step has it from every rank."""
    ranks = [rank.rank for rank in files.ranks]
    per_rank = [rank.sources[source] for rank in files.ranks if source in rank.sources]
    if len(per_rank) < len(ranks):
        return None
    notes: list[str] = []
    is_own = source in OWN_SOURCES
    steps = _common_steps(per_rank, notes)
    if is_own:
        steps = _undisturbed(steps, files.run, notes)
    if len(steps) == 0:
        return None
    matches = files.matches and len(ranks) > 1 and is_own
    sides = rows.by_source[source].sides(per_rank, steps, matches)
    if sides.num_overlapping:
        notes.append(
            f"{sides.num_overlapping} step windows overlap the next one: total counts that time twice"
        )
    left_out = left_out_steps(sides)
    if source == "host":
        complete_alone(sides, left_out)
    not_measured = add_measures(sides, files.run)
    totals = files.totals or totals_of_ranks(ranks, sides.metrics, sides.integers["num_collectives"])
    matched = None if sides.calls is None else match_calls(ranks, sides.calls)
    if matched is not None:
        notes += matched.notes
        if matched.num_matched:
            split_waits_of_records(sides, matched)
    return Run(
        label=files.label,
        path=files.path,
        source=source,
        ranks=ranks,
        global_step=steps,
        start_unix_ns=sides.integers["start_unix_ns"],
        metrics=sides.metrics,
        num_collectives=sides.integers["num_collectives"],
        host_bound=sides.host_bound,
        has_details=sides.has_details,
        has_collectives=sides.has_collectives,
        left_out=left_out,
        totals=totals,
        collectives=collectives(sides, None if matched is None else matched.waits),
        records=partial(files.records, source),
        columns=None if files.columns is None else partial(files.columns, source),
        run=files.run,
        not_measured=not_measured,
        notes=notes,
        clock_offset_ns={} if matched is None else matched.clock.moved_ns,
        arrivals=arrivals_of_records(ranks, sides, matched),
        host_parts=sides.host_parts,
    )


def _common_steps(per_rank: list[RankSteps], notes: list[str]) -> NDArray[np.int64]:
    """Steps that every rank did, and did together; what is left out is noted."""
    first = per_rank[0]
    common = first.global_step
    together = np.ones(len(common), dtype=bool)
    for of_rank in per_rank[1:]:
        rows, is_there = places_of(common, of_rank)
        if not is_there.all():
            rows, together, common = rows[is_there], together[is_there], common[is_there]
        of_first, _ = places_of(common, first)
        together &= of_rank.attempt[rows] == first.attempt[of_first]
        together &= of_rank.rollbacks[rows] == first.rollbacks[of_first]
    if not together.all():
        notes.append(
            f"{int((~together).sum())} steps are left out: the ranks' last records of them are of different "
            "attempts"
        )
        common = common[together]
    longest = max(len(of_rank.global_step) for of_rank in per_rank)
    if 0 < len(common) < longest:
        notes.append(f"{longest - len(common)} of {longest} steps are left out: not every rank recorded them")
    return common


def _undisturbed(steps: NDArray[np.int64], run: RunRecord | None, notes: list[str]) -> NDArray[np.int64]:
    """Steps without those in which torch's profiler worked; how many those were is noted."""
    profiled = [] if run is None else run.coverage.get("profiled_steps", [])
    unprofiled = steps[~np.isin(steps, profiled)]
    if not 0 < len(unprofiled) < len(steps):
        return steps  # all of them: slow numbers are better than none
    notes.append(f"{len(steps) - len(unprofiled)} steps are left out: torch's profiler worked in them")
    return unprofiled
