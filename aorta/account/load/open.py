"""Opens a run: a folder of records, or traces, read rank by rank in as many processes as are asked for.

A rank's numbers are a row of the run as soon as they are read, and a column is a step. What stays of a rank
beside them is what is known of its steps, and its collectives, until ranks are matched. Details of single
steps are read again when a picture or a page asks for them (again.py).
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from numpy.typing import NDArray

from aorta.account.load.again import (
    columns_of_rank,
    kernel_names,
    kernels_of,
    missing_beside,
    places_of,
    records_of,
    sites_of,
    stacks_of,
)
from aorta.account.load.arrays import MOST_IN_MEMORY, ArrayFile, Arrays
from aorta.account.load.attempts import ranks_of_run
from aorta.account.load.ending import (
    cut,
    damage_line,
    died_early_text,
    last_ending,
    run_record,
    shortage_text,
    story,
)
from aorta.account.load.evidence import comm_evidence, possible_of_records
from aorta.account.load.goodput import goodput, goodput_text
from aorta.account.load.measures import add_measures, totals_of_ranks
from aorta.account.load.rank.calls import MAX_CALLS
from aorta.account.load.rank.columns import OF_RUN, Flags, Floats, RankFile, RankSteps
from aorta.account.load.rank.host import PREFIX as HOST
from aorta.account.load.rank.reduce import LostRank, reduce_file, salvage
from aorta.account.load.waits import (
    MatchedRanks,
    arrivals_of_records,
    busbw_by_transfer,
    collectives,
    match_calls,
    split_waits_of_records,
)
from aorta.account.metrics import METRICS
from aorta.account.model import Progress, Run
from aorta.account.rows import row_blocks
from aorta.errors import ReportError, TraceError
from aorta.processes import parallel_map, usual_jobs
from aorta.records.files import STEPS_FILE, files_beside
from aorta.records.launches import read_notes
from aorta.records.schema import RunRecord, StepRecord
from aorta.records.state import RankState, read_states
from aorta.records.table import StepTable
from aorta.timeline.types import OWN_SOURCES, Source

if TYPE_CHECKING:  # readers of traces take long to import
    from aorta.traces.steps import Reading

SOURCES: tuple[Source, ...] = ("kernels", "events", "host", "kineto", "rocprofv3", "nsys", "projected")
FEWEST_BY_KERNELS = 8
"""Steps timed by kernel records from which on they speak for a run: its others are profiled or not timed."""
INTEGERS = ("start_unix_ns", "num_collectives")


def load_run(
    path: Path | str | Sequence[Path],
    label: str,
    *,
    jobs: int | None = 1,
    dask: str | None = None,
    progress: Progress | None = None,
    reading: "Reading | None" = None,
) -> Run:
    """The run at path: a folder, a trace, or traces of one run. ReportError, RecordError or TraceError in one
    line where it cannot be used.

    jobs: processes that read ranks at the same time, None for as many as pay; dask: the address of a
    scheduler that does, or local for one with workers on this machine. reading: how traces are read, and
    whether what is left of a damaged run is (as a rule it is refused).
    """

    def traces(of: Path | Sequence[Path]) -> Run:
        from aorta.account.load.traces.open import load_traces  # which puts ranks together as is done here
        from aorta.traces.steps import Reading

        return load_traces(of, label, jobs=jobs, dask=dask, progress=progress, reading=reading or Reading())

    several = () if isinstance(path, Path | str) or len(path) < 2 else tuple(path)
    path = several[0].parent if several else Path(path if isinstance(path, Path | str) else path[0])
    if several:
        return traces(several)
    try:
        if not path.exists():
            raise ReportError(f"there is no folder or trace {path}")
        files = _in_order(path.iterdir()) if path.is_dir() else []
        (path / "run.json").exists()  # raises in a folder whose names may be listed, and no more
    except OSError as error:
        raise ReportError(f"cannot read {path}: {error.strerror}") from error
    if files:
        jobs = usual_jobs(files) if jobs is None else jobs
        strict = reading is None or reading.strict
        return _load_records(path, label, files, jobs, dask, progress, strict)
    try:
        run = traces(path)
    except TraceError as error:
        place_text = "" if str(path) in str(error) else f"{path}: "
        raise TraceError(f"{place_text}{error}") from error
    busbw_by_transfer(run.metrics)
    return run


def _in_order(paths: Iterable[Path]) -> list[Path]:
    """Files of lines, in order of ranks."""
    named = [(int(name[1]), path) for path in paths if (name := STEPS_FILE.fullmatch(path.name))]
    return [path for _, path in sorted(named)]


def _load_records(
    folder: Path,
    label: str,
    paths: list[Path],
    jobs: int,
    dask: str | None,
    progress: Progress | None,
    strict: bool,
) -> Run:
    # lstat: a link to itself is damage that the readers of ranks tell. A killed rank leaves lines unwritten.
    besides = filter(None, map(files_beside, paths))
    has_steps = any(path.lstat().st_size for path in paths) or any(b.unwritten.exists() for b in besides)
    if not has_steps and (early := died_early_text(folder)):
        raise ReportError(f"{folder}: no step was recorded; {'; '.join(early)}")
    notes: list[str] = []
    run, damage = run_record(folder, notes, strict)
    rows = RankRows(len(paths))
    num_calls = 0
    results = parallel_map(reduce_file if strict else salvage, paths, jobs=jobs, dask=dask, error=ReportError)
    for num_read, rank in enumerate(results, start=1):
        if progress is not None:
            progress(label, num_read, len(paths))
        if isinstance(rank, LostRank):
            notes.append(f"left out: {rank.reason}")
            continue
        if rank.left_out:
            damage.append(f"parts of {rank.path.name}")
        rows.add(rank)
        notes += rank.notes
        num_calls += sum(steps.num_calls for steps in rank.sources.values())
        if num_calls > MAX_CALLS:
            _forget_calls(rows.ranks)
    if num_calls > MAX_CALLS:
        notes.append(f"{num_calls} collectives are too many to match across ranks: waits are unknown")
    if not rows.ranks:
        raise ReportError(f"{folder}: nothing is left to read: {notes[-1]}")
    ranks = ranks_of_run(folder, rows.ranks, run, notes, strict)
    files = {rank.rank: rank for rank in ranks}
    states = read_states(folder)
    loaded = assemble(
        RunFiles(
            folder,
            label,
            ranks,
            run,
            records=partial(records_of, files),
            columns=partial(columns_of_rank, files),
            rows=rows,
            matches=num_calls <= MAX_CALLS,
            on_one_host=_on_one_host(files, states),
        ),
        notes,
    )
    loaded.possible_comm_ms.update(possible_of_records(loaded, partial(kernel_names, paths)))
    if unsure := comm_evidence(loaded).note:
        loaded.notes.append(unsure)
    launch_notes = read_notes(folder)
    loaded.notes.extend(missing_beside(ranks, {path.name for path in folder.iterdir()}))
    are_cut = list(cut(run, states.values(), ranks))
    if are_cut and strict:
        raise ReportError(are_cut[0][0])
    damage += [text for text, _ in are_cut]
    damage_text = damage_line(damage, loaded, ranks, max((num for _, num in are_cut), default=0))
    loaded.story[:] = [
        *([] if damage_text is None else [damage_text]),
        *story(run, states.values(), ranks, launch_notes),
        *shortage_text(folder, run, files, loaded),
    ]
    if run is not None and run.attempts and ranks:
        loaded.goodput[:] = goodput(ranks[0].path, run, last_ending(run, states.values(), launch_notes))
        if len(run.attempts) > 1 and loaded.goodput:
            loaded.story.append(goodput_text(loaded.goodput))
    loaded = msgspec.structs.replace(
        loaded,
        damage=damage_text,
        stacks=partial(stacks_of, files, loaded.notes),
        sites=partial(sites_of, files, loaded.notes),
    )
    if loaded.source != "kernels":
        return loaded
    return msgspec.structs.replace(loaded, kernels=partial(kernels_of, files))


def _on_one_host(ranks: Iterable[int], states: dict[int, RankState]) -> bool:
    """Returns True where all ranks say so of the run's only attempt."""
    processes = [states[rank].process if rank in states else None for rank in ranks]
    hosts = {process.host if process is not None and not process.attempt else "" for process in processes}
    return len(hosts) == 1 and "" not in hosts


def _forget_calls(ranks: list[RankFile]) -> None:
    for rank in ranks:
        for steps in rank.sources.values():
            steps.calls = None


# -- a run of its ranks -------------------------------------------------------------------------------------


class RankRows:
    """Ranks in order, whose numbers become rows as they come."""

    def __init__(self, num_ranks: int) -> None:
        self.ranks: list[RankFile] = []
        self.by_source: dict[Source, Rows] = {}
        self._num_ranks, self._file = num_ranks, ArrayFile()

    @classmethod
    def of(cls, ranks: Sequence[RankFile]) -> "RankRows":
        rows = cls(len(ranks))
        for rank in ranks:
            rows.add(rank)
        return rows

    def add(self, rank: RankFile) -> None:
        sources = {}
        for source, of_rank in rank.sources.items():
            if source not in self.by_source:
                self.by_source[source] = Rows(self._num_ranks, self._file)
            sources[source] = self.by_source[source].add(len(self.ranks), of_rank)
        self.ranks.append(replace(rank, sources=sources))


class Rows:
    """The rows by one source. Columns are the steps of the first rank: every rank did no others."""

    def __init__(self, num_ranks: int, file: ArrayFile) -> None:
        self._num_ranks, self._file = num_ranks, file
        self._steps: NDArray[np.int64] | None = None
        self._numbers: tuple[Arrays, Arrays] | None = None
        """Floats, and integers."""

    def add(self, row: int, of_rank: RankSteps) -> RankSteps:
        """Take in the numbers of a rank as a row; the steps without them, which are those of the first rank
        where they are alike."""
        if self._steps is None or self._numbers is None:
            self._steps = of_rank.global_step
            shape = (self._num_ranks, len(self._steps))
            file = self._file if shape[0] * shape[1] > MOST_IN_MEMORY else None
            self._numbers = Arrays(shape, file), Arrays(shape, file, np.int64)
        floats, integers = self._numbers
        if np.array_equal(of_rank.global_step, self._steps):
            of_rank = replace(of_rank, global_step=self._steps)
            places: NDArray[np.intp] | slice = slice(None)
        else:
            places, _ = places_of(self._steps, of_rank)  # what the rank has not is chosen by nobody
        for name, values in of_rank.numbers.items():
            (integers if name in INTEGERS else floats).set_row(name, row, values[places])
        return replace(of_rank, numbers={})

    def numbers(self, num_ranks: int, steps: NDArray[np.int64]) -> tuple[Arrays, Arrays, Arrays, Floats]:
        """Metrics, columns of the host, integers and host_bound of the first ranks in these steps, which all
        of them did."""
        assert self._numbers is not None
        assert self._steps is not None
        columns = np.searchsorted(self._steps, steps)
        floats, integers = (arrays.chosen(num_ranks, columns) for arrays in self._numbers)
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
    rows: RankRows | None = None
    """None: those of ranks, which have their columns then."""
    matches: bool = True
    """Ranks are matched by their collectives."""
    on_one_host: bool = False


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
    metrics, host_parts, integers, host_bound = rows.by_source[source].numbers(len(ranks), steps)
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
    if source == "host" and left_out.any():
        _complete_alone(metrics, left_out, num_collectives)
    not_measured: dict[str, str] = {}
    for of_rank in per_rank:
        for name, reason in of_rank.not_measured.items():
            not_measured.setdefault(name, reason)
    add_measures(metrics, collectives_kept, files.run, not_measured)
    totals = files.totals or totals_of_ranks(ranks, metrics, num_collectives)
    is_one_clock = source == "host" and files.on_one_host
    matched = _matched(ranks, per_rank, places, is_one_clock) if files.matches and is_own else None
    if matched is not None:
        notes += matched.notes
        if matched.num_matched:
            knows_waits = collectives_kept & has_exposed
            split_waits_of_records(metrics, host_parts, start_ns, matched, collectives_kept, knows_waits)
    kinds = [
        of_rank.kinds_in(place[has_collectives]) for of_rank, place in zip(per_rank, places, strict=True)
    ]
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
        collectives=collectives(kinds, has_collectives, matched),
        records=partial(files.records, source),
        columns=None if files.columns is None else partial(files.columns, source),
        record=files.run,
        not_measured=not_measured,
        notes=notes,
        clock_offset_ns={} if matched is None else matched.clock.moved_ns,
        clock_residual_us=None if matched is None else matched.clock.residual_us,
        arrivals=arrivals_of_records(ranks, matched, len(steps)),
        host_parts=host_parts,
    )


def _matched(
    ranks: list[int],
    per_rank: Sequence[RankSteps],
    places: Sequence[NDArray[np.intp]],
    is_one_clock: bool,
) -> MatchedRanks | None:
    """None where there is one rank alone, or the calls of some rank are not known."""
    calls = [of_rank.calls_in(place) for of_rank, place in zip(per_rank, places, strict=True)]
    known = [of_rank for of_rank in calls if of_rank is not None]
    if len(ranks) < 2 or len(known) < len(ranks):
        return None
    return match_calls(ranks, known, is_one_clock=is_one_clock)


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


# -- steps that the overhead left out --------------------------------------------------------------------


def _left_out(metrics: Arrays) -> Flags:
    """[step]: no rank has times of the source in it, and other steps have."""
    is_timed = np.zeros(metrics.shape[1], dtype=bool)
    for rows in row_blocks(metrics.shape):
        is_timed |= np.isfinite(metrics["compute_ms"][rows]).any(axis=0)
    result: Flags = ~is_timed & is_timed.any()
    return result


def _complete_alone(metrics: Arrays, left_out: Flags, num_collectives: NDArray[np.int64]) -> None:
    """Fill in what source host would have noted of these steps, in a run of one process none of whose
    recorded steps communicates: on a CPU it computes whenever it is in a step."""
    if metrics.shape[0] != 1 or np.nan_to_num(metrics["comm_ms"]).any() or num_collectives.any():
        return
    step_ms, between_ms = metrics["step_ms"], metrics["between_steps_ms"]
    for name, values in {"compute_ms": step_ms - between_ms, "idle_ms": between_ms}.items():
        metrics[name] = np.where(left_out, values, metrics[name])
    none = ("comm_ms", "hidden_ms", "exposed_ms", "hidden_per_compute")
    for name in (*none, "compute_allreduce_ms", "compute_reducescatter_ms", "stalled_ms"):
        metrics[name] = np.where(left_out & np.isfinite(step_ms), 0.0, metrics[name])
