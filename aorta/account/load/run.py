"""Puts the columns of all ranks side by side: one table of numbers per source.

Files go by line by line and rank by rank; what stays is one float per rank, step and metric. Details of
single steps are read again when a picture or a page asks for them.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from aorta.account.load.arrays import MOST_IN_MEMORY, ArrayFile
from aorta.account.load.collectives import collectives
from aorta.account.load.measures import add_measures, totals_of_ranks
from aorta.account.load.rank.columns import RankFile, SourceColumns
from aorta.account.load.sides import side_by_side
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
    file: ArrayFile | None = None
    """Keeps arrays of more than MOST_IN_MEMORY numbers."""
    matches: bool = True
    """Ranks are matched by their collectives."""


def assemble(files: RunFiles, notes: list[str]) -> Run:
    """The Run of the source with the most lines, the others beside it."""
    counts: Counter[Source] = Counter()
    for rank in files.ranks:
        counts.update({source: len(columns.global_step) for source, columns in rank.columns.items()})
    runs: list[Run] = []
    for source in sorted(counts, key=lambda source: (_place(source, counts), SOURCES.index(source))):
        source_run = _one_source(files, source)
        if source_run is None:
            notes.append(f"lines of source {source} are left out: no step has them from every rank")
        else:
            runs.append(source_run)
    if not runs:
        lines = ", ".join(
            f"rank {rank.rank} {sum(len(c.global_step) for c in rank.columns.values())}"
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


def _one_source(files: RunFiles, source: Source) -> Run | None:
    """The run by one source; None where no step has it from every rank."""
    ranks = [rank.rank for rank in files.ranks]
    per_rank = [rank.columns[source] for rank in files.ranks if source in rank.columns]
    if len(per_rank) < len(ranks):
        return None
    notes: list[str] = []
    is_own = source in OWN_SOURCES
    steps = _common_steps(per_rank, notes)
    if is_own:
        steps = _undisturbed(steps, files.run, notes)
    if len(steps) == 0:
        return None
    file = files.file if len(ranks) * len(steps) > MOST_IN_MEMORY else None
    sides = side_by_side(per_rank, steps, file, files.matches and len(ranks) > 1 and is_own)
    if sides.num_overlapping:
        notes.append(
            f"{sides.num_overlapping} step windows overlap the next one: total counts that time twice"
        )
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
        host_bound=sides.flags["host_bound"],
        has_details=sides.has_details,
        has_collectives=sides.has_collectives,
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


def _common_steps(per_rank: list[SourceColumns], notes: list[str]) -> NDArray[np.int64]:
    """Steps that every rank did, and did together; what is left out is noted."""
    common = per_rank[0].global_step
    for columns in per_rank[1:]:
        if columns.global_step is not common:
            common = common[np.isin(common, columns.global_step, assume_unique=True)]
    together = _done_together(per_rank, common)
    if not together.all():
        notes.append(
            f"{int((~together).sum())} steps are left out: the ranks' last records of them are of different "
            "attempts"
        )
        common = common[together]
    longest = max(len(columns.global_step) for columns in per_rank)
    if 0 < len(common) < longest:
        notes.append(f"{longest - len(common)} of {longest} steps are left out: not every rank recorded them")
    return common


def _done_together(per_rank: list[SourceColumns], steps: NDArray[np.int64]) -> NDArray[np.bool_]:
    """[step]: the ranks' numbers are of the same attempt, after as many rollbacks."""
    alike = np.ones(len(steps), dtype=bool)
    first = [column[np.searchsorted(per_rank[0].global_step, steps)] for column in _passes(per_rank[0])]
    for columns in per_rank[1:]:
        rows = np.searchsorted(columns.global_step, steps)
        for column, of_first in zip(_passes(columns), first, strict=True):
            alike &= column[rows] == of_first
    return alike


def _passes(columns: SourceColumns) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    return columns.passes.attempt, columns.passes.rollbacks


def _undisturbed(steps: NDArray[np.int64], run: RunRecord | None, notes: list[str]) -> NDArray[np.int64]:
    """Steps without those in which torch's profiler worked; how many those were is noted."""
    profiled = [] if run is None else run.coverage.get("profiled_steps", [])
    unprofiled = steps[~np.isin(steps, profiled)]
    if not 0 < len(unprofiled) < len(steps):
        return steps  # all of them: slow numbers are better than none
    notes.append(f"{len(steps) - len(unprofiled)} steps are left out: torch's profiler worked in them")
    return unprofiled
