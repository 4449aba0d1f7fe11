"""Puts the ranks of a run together, of records or traces: a rank is a row, a step a column.

A rank's numbers are a row of the run as soon as they are read. What stays of a rank beside them is what is
known of its steps, and its collectives, until ranks are matched.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from aorta.account.load.again import places_of
from aorta.account.load.arrays import MOST_IN_MEMORY, ArrayFile, Arrays
from aorta.account.load.measures import add_measures, totals_of_ranks
from aorta.account.load.rank.columns import OF_RUN, RankFile, RankSteps
from aorta.account.load.rank.host import PREFIX as HOST
from aorta.account.load.waits import (
    all_matched,
    arrivals,
    collectives,
    is_one_group,
    match_records,
    split_exposed,
    split_waits_by_step,
)
from aorta.account.metrics import METRICS
from aorta.account.model import Run
from aorta.account.rows import row_blocks
from aorta.errors import ReportError
from aorta.records.schema import NOTHING_NOTED, RunRecord, StepRecord
from aorta.records.table import StepTable
from aorta.steps.notes import LEFT_OUT
from aorta.timeline.arrays import Flags, Floats, Ints
from aorta.timeline.matching import RankCalls
from aorta.timeline.types import OWN_SOURCES, Source
from aorta.timeline.waits import RankView

SOURCES: tuple[Source, ...] = ("kernels", "events", "host", "kineto", "rocprofv3", "nsys")
FEWEST_BY_KERNELS = 8
"""Steps timed by kernel records from which on they speak for a run: its others are profiled or not timed."""
INTEGERS = ("start_unix_ns", "num_collectives")


class RunArrays:
    """Ranks in order, whose numbers become rows as they come. Of each source, columns are the steps of the
    first rank: every rank did no others."""

    def __init__(self, num_ranks: int) -> None:
        self.ranks: list[RankFile] = []
        self._num_ranks, self._file = num_ranks, ArrayFile()
        self._of_source: dict[Source, tuple[Ints, Arrays, Arrays]] = {}
        """Steps, floats and integers."""

    @classmethod
    def of(cls, ranks: Sequence[RankFile]) -> "RunArrays":
        arrays = cls(len(ranks))
        for rank in ranks:
            arrays.add(rank)
        return arrays

    def add(self, rank: RankFile) -> None:
        sources = {source: self._taken(source, of_rank) for source, of_rank in rank.sources.items()}
        self.ranks.append(replace(rank, sources=sources))

    def _taken(self, source: Source, of_rank: RankSteps) -> RankSteps:
        """The steps of a rank without their numbers, which are a row then; the first rank's where these are
        alike."""
        if source not in self._of_source:
            shape = (self._num_ranks, len(of_rank.global_step))
            file = self._file if shape[0] * shape[1] > MOST_IN_MEMORY else None
            self._of_source[source] = of_rank.global_step, Arrays(shape, file), Arrays(shape, file, np.int64)
        steps, floats, integers = self._of_source[source]
        if np.array_equal(of_rank.global_step, steps):
            of_rank = replace(of_rank, global_step=steps)
            places: NDArray[np.intp] | slice = slice(None)
        else:
            places, _ = places_of(steps, of_rank)  # what the rank has not is chosen by nobody
        for name, values in of_rank.numbers.items():
            (integers if name in INTEGERS else floats).set_row(name, len(self.ranks), values[places])
        return replace(of_rank, numbers={})

    def numbers(self, source: Source, num_ranks: int, steps: Ints) -> tuple[Arrays, Arrays, Arrays, Floats]:
        """Metrics, columns of the host, integers and host_bound of the first ranks in these steps, which all
        of them did."""
        own_steps, *arrays = self._of_source[source]
        columns = np.searchsorted(own_steps, steps)
        floats, integers = (of_type.chosen(num_ranks, columns) for of_type in arrays)
        in_order = [*METRICS, *sorted(floats.keys() - {*METRICS, *OF_RUN})]
        metrics, host_parts = floats.parted(
            [name for name in in_order if not name.startswith(HOST)],
            [name for name in in_order if name.startswith(HOST)],
        )
        return metrics, host_parts, integers, floats["host_bound"]


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
    arrays: RunArrays | None = None
    """None: those of ranks, which have their columns then."""
    match: Callable[[Source, list[int], list[RankCalls]], RankView | None] = match_records
    """Finds the collectives that are the same on several ranks."""


def assemble(files: RunFiles, notes: list[str]) -> Run:
    """The Run of the source with the most lines, the others beside it."""
    counts: Counter[Source] = Counter()
    arrays = files.arrays or RunArrays.of(files.ranks)
    for rank in files.ranks:
        counts.update({source: len(steps.global_step) for source, steps in rank.sources.items()})
    runs: list[Run] = []
    for source in sorted(counts, key=lambda source: (_place(source, counts), SOURCES.index(source))):
        source_run = _one_source(files, arrays, source)
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


def _one_source(files: RunFiles, arrays: RunArrays, source: Source) -> Run | None:
    """The run by one source; None where no step has it from every rank."""
    ranks = [rank.rank for rank in files.ranks]
    per_rank = [rank.sources[source] for rank in files.ranks if source in rank.sources]
    if len(per_rank) < len(ranks):
        return None
    notes: list[str] = []
    is_own = source in OWN_SOURCES
    steps = _common_steps(per_rank, notes)
    if is_own:
        steps = _undisturbed(steps, files.run or NOTHING_NOTED, notes)
    if len(steps) == 0:
        return None
    metrics, host_parts, integers, host_bound = arrays.numbers(source, len(ranks), steps)
    start_ns, num_collectives = integers["start_unix_ns"], integers["num_collectives"]
    places = [places_of(steps, of_rank)[0] for of_rank in per_rank]
    has_details, collectives_kept, has_exposed = (
        np.array([getattr(of_rank, name)[place] for of_rank, place in zip(per_rank, places, strict=True)])
        for name in ("has_details", "has_collectives", "has_exposed")
    )
    has_collectives = np.logical_and.reduce(collectives_kept)
    num_overlapping = sum(
        of_rank.num_overlapping(place) for of_rank, place in zip(per_rank, places, strict=True)
    )
    if num_overlapping:
        notes.append(f"{num_overlapping} step windows overlap the next one: total counts that time twice")
    left_out = _left_out(metrics)
    not_measured: dict[str, str] = {}
    for of_rank in per_rank:
        for name, reason in of_rank.not_measured.items():
            not_measured.setdefault(name, reason)
    if source == "host" and left_out.any():
        _complete_alone(metrics, left_out, num_collectives, not_measured)
    add_measures(metrics, collectives_kept, files.run or NOTHING_NOTED, not_measured)
    totals = files.totals or totals_of_ranks(ranks, metrics, num_collectives)
    view = _matched(files, source, per_rank, places)
    matched_ms = None
    if view is not None:
        notes += view.notes
        if any(view.num_matched):
            knows_waits = collectives_kept & has_exposed
            if not is_own:
                knows_waits &= all_matched(start_ns, metrics["step_ms"], view)
            matched_ms = split_waits_by_step(
                metrics, host_parts, start_ns, view, collectives_kept, knows_waits
            )
    kinds = collectives(
        [of_rank.kinds_in(place[has_collectives]) for of_rank, place in zip(per_rank, places, strict=True)],
        has_collectives,
        view,
    )
    split_exposed(metrics, matched_ms, is_one_group(kinds, len(ranks)))
    return Run(
        label=files.label,
        path=files.path,
        source=source,
        ranks=ranks,
        global_step=steps,
        start_unix_ns=start_ns,
        metrics=metrics,
        num_collectives=num_collectives,
        host_bound=host_bound,
        has_details=np.logical_and.reduce(has_details),
        has_collectives=has_collectives,
        left_out=left_out,
        totals=totals,
        collectives=kinds,
        records=partial(files.records, source),
        columns=None if files.columns is None else partial(files.columns, source),
        record=files.run,
        not_measured=not_measured,
        notes=notes,
        clock_offset_ns={} if view is None else view.clock.moved_ns,
        clock_residual_us=None if view is None else view.clock.residual_us,
        arrivals=None if view is None or matched_ms is None else arrivals(view, matched_ms),
        host_parts=host_parts,
    )


def _matched(
    files: RunFiles, source: Source, per_rank: Sequence[RankSteps], places: Sequence[NDArray[np.intp]]
) -> RankView | None:
    """None where there is one rank alone, or the calls of some rank are not known."""
    calls = [of_rank.calls_in(place) for of_rank, place in zip(per_rank, places, strict=True)]
    known = [of_rank for of_rank in calls if of_rank is not None]
    if len(known) < max(len(calls), 2):
        return None
    return files.match(source, [rank.rank for rank in files.ranks], known)


def _common_steps(per_rank: list[RankSteps], notes: list[str]) -> Ints:
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


def _undisturbed(steps: Ints, run: RunRecord, notes: list[str]) -> Ints:
    """Steps without those in which torch's profiler worked; how many those were is noted."""
    unprofiled = steps[~np.isin(steps, run.coverage.get("profiled_steps", []))]
    if not 0 < len(unprofiled) < len(steps):
        return steps  # all of them: slow numbers are better than none
    notes.append(f"{len(steps) - len(unprofiled)} steps are left out: torch's profiler worked in them")
    return unprofiled


# -- steps that the overhead left out --------------------------------------------------------------------


def _left_out(metrics: Arrays) -> Flags:
    """[step]: no rank has times of the source in it, and other steps have."""
    is_timed = np.zeros(metrics.shape[1], dtype=bool)
    for rows in row_blocks(metrics.shape):
        is_timed |= np.isfinite(metrics["compute_ms"][rows]).any(axis=0)
    return ~is_timed & is_timed.any()


def _complete_alone(
    metrics: Arrays, left_out: Flags, num_collectives: Ints, not_measured: dict[str, str]
) -> None:
    """Fill in what source host would have noted of these steps, in a run of one process none of whose
    recorded steps communicates: on a CPU it computes whenever it is in a step. Then the overhead is no reason
    why anything was not measured."""
    if metrics.shape[0] != 1 or np.nan_to_num(metrics["comm_ms"]).any() or num_collectives.any():
        return
    step_ms, between_ms = metrics["step_ms"], metrics["between_steps_ms"]
    for name, values in {"compute_ms": step_ms - between_ms, "idle_ms": between_ms}.items():
        metrics[name] = np.where(left_out, values, metrics[name])
    none = ("comm_ms", "hidden_ms", "exposed_ms", "hidden_per_compute")
    for name in (*none, "compute_allreduce_ms", "compute_reducescatter_ms", "stalled_ms"):
        metrics[name] = np.where(left_out & np.isfinite(step_ms), 0.0, metrics[name])
    for name in [name for name, reason in not_measured.items() if reason == LEFT_OUT]:
        del not_measured[name]
