"""Opens a run: a folder of records, or traces, read rank by rank in as many processes as are asked for."""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

import msgspec

from aorta.account.load.attempts import ranks_of_run
from aorta.account.load.ending import cut, last_ending, story
from aorta.account.load.evidence import comm_evidence, possible_of_records
from aorta.account.load.goodput import goodput, goodput_text
from aorta.account.load.rank.calls import MAX_CALLS
from aorta.account.load.rank.columns import RankFile
from aorta.account.load.rank.kernels import named_spans
from aorta.account.load.rank.reduce import (
    LostRank,
    blocks_with_unwritten,
    reduce_file,
    salvage,
    with_unwritten,
)
from aorta.account.load.run import RankRows, RunFiles, assemble, places_of
from aorta.account.load.shortage import shortage_lines
from aorta.account.load.traces.open import load_traces
from aorta.account.load.waits import busbw_by_transfer
from aorta.account.model import DAMAGED, MOST_DAMAGED, NamedSpan, Progress, Run
from aorta.errors import RecordError, ReportError, TraceError
from aorta.processes import parallel_map, usual_jobs
from aorta.records.files import STEPS_FILE, files_beside, sites_name, stacks_name
from aorta.records.launches import read_notes
from aorta.records.memory import read_shortages
from aorta.records.reader import kernel_names_beside, read_beside, read_run
from aorta.records.schema import CallSites, RunRecord, Source, StepRecord
from aorta.records.stacks import Stacks, joined, read_stacks
from aorta.records.state import read_states
from aorta.records.table import StepTable
from aorta.traces.sources import Reading

LEAST_LEFT = 0.5
"""Share of the longest rank's steps below which what is left of a damaged run is refused: a short stretch is
not what the run was."""


def load_run(
    path: Path | str | Sequence[Path],
    label: str,
    *,
    jobs: int | None = 1,
    dask: str | None = None,
    progress: Progress | None = None,
    reading: Reading | None = None,
) -> Run:
    """The run at path: a folder, a trace, or traces of one run. ReportError, RecordError or TraceError in one
    line where it cannot be used.

    jobs: processes that read ranks at the same time, None for as many as pay; dask: the address of a
    scheduler that does, or local for one with workers on this machine. reading: how traces are read, and
    whether what is left of a damaged run is (as a rule it is refused).
    """
    several = () if isinstance(path, Path | str) or len(path) < 2 else tuple(path)
    path = several[0].parent if several else Path(path if isinstance(path, Path | str) else path[0])
    if several:
        return load_traces(
            several, label, jobs=jobs, dask=dask, progress=progress, reading=reading or Reading()
        )
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
        run = load_traces(path, label, jobs=jobs, dask=dask, progress=progress, reading=reading or Reading())
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
    if not has_steps and (early := _died_early(folder)):
        raise ReportError(f"{folder}: no step was recorded; {'; '.join(early)}")
    notes: list[str] = []
    run, damage = _run_record(folder, notes, strict)
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
    loaded = assemble(
        RunFiles(
            folder,
            label,
            ranks,
            run,
            records=partial(_records_of, files),
            columns=partial(_columns_of, files),
            rows=rows,
            matches=num_calls <= MAX_CALLS,
        ),
        notes,
    )
    loaded.possible_comm_ms.update(possible_of_records(loaded, partial(_kernel_names, paths)))
    if unsure := comm_evidence(loaded).note:
        loaded.notes.append(unsure)
    states, launch_notes = list(read_states(folder).values()), read_notes(folder)
    loaded.notes.extend(_missing_beside(ranks, {path.name for path in folder.iterdir()}))
    are_cut = list(cut(run, states, ranks))
    if are_cut and strict:
        raise ReportError(are_cut[0][0])
    damage += [text for text, _ in are_cut]
    damage_text = _damage_text(damage, loaded, ranks, max((num for _, num in are_cut), default=0))
    loaded.story[:] = [
        *([] if damage_text is None else [damage_text]),
        *story(run, states, ranks, launch_notes),
        *_shortage_text(folder, run, files, loaded),
    ]
    if run is not None and run.attempts and ranks:
        loaded.goodput[:] = goodput(ranks[0].path, run, last_ending(run, states, launch_notes))
        if len(run.attempts) > 1 and loaded.goodput:
            loaded.story.append(goodput_text(loaded.goodput))
    loaded = msgspec.structs.replace(
        loaded,
        damage=damage_text,
        stacks=partial(_stacks_of, files, loaded.notes),
        sites=partial(_sites_of, files, loaded.notes),
    )
    if loaded.source != "kernels":
        return loaded
    return msgspec.structs.replace(loaded, kernels=partial(_kernels_of, files))


def _run_record(folder: Path, notes: list[str], strict: bool) -> tuple[RunRecord | None, list[str]]:
    """run.json, None where there is none or (not strict) none that can be read; and what is damaged."""
    path = folder / "run.json"
    if not path.exists():
        notes.append("run.json is missing: device and configuration are not known")
        return None, []
    try:
        return read_run(folder), []
    except RecordError as error:
        if strict:
            raise
        notes.append(f"device and configuration are not known: {error}")
        return None, ["run.json"]


def _damage_text(damage: list[str], run: Run, ranks: list[RankFile], num_written: int) -> str | None:
    """The line that stands before all numbers of a damaged run: what is damaged, and how much is left.

    num_written: steps of a rank, as far as the ranks themselves have told.
    """
    size = max(rank.world_size for rank in ranks)
    absent = sorted(set(range(size)) - set(run.ranks))
    if absent:
        some = ", ".join(map(str, absent[:MOST_DAMAGED])) + (", ..." if len(absent) > MOST_DAMAGED else "")
        damage = [f"all of rank{'s' if len(absent) > 1 else ''} {some}", *damage]
    if not damage:
        return None
    read = (len(done.global_step) for rank in ranks for done in rank.sources.values())
    steps = max(num_written, *read)
    if run.num_steps < LEAST_LEFT * steps:
        raise ReportError(
            f"{damage[0]}: {DAMAGED}, and too little is left: {run.num_steps} of at least {steps} steps"
        )
    more = f" and {len(damage) - MOST_DAMAGED} more" if len(damage) > MOST_DAMAGED else ""
    left = f"{len(run.ranks)} of {size} ranks and {run.num_steps} of at least {steps} steps"
    return (
        f"{DAMAGED}: {'; '.join(damage[:MOST_DAMAGED])}{more}. The numbers are of what is left, {left}"
        " (--strict refuses it)"
    )


def _died_early(folder: Path) -> list[str]:
    """How a run without a step ended or that it goes on, and what it was short of if that was memory."""
    states = read_states(folder)
    shortages = read_shortages(folder, states)
    current = {rank: one for rank, one in shortages.items() if one.run_id == states[rank].process.run_id}
    run, _ = _run_record(folder, [], strict=False)
    return [
        *shortage_lines(current, lambda rank: (), states),
        *story(run, states.values(), (), read_notes(folder)),
    ]


def _shortage_text(folder: Path, run: RunRecord | None, files: dict[int, RankFile], loaded: Run) -> list[str]:
    """Of the run's last attempt: what an earlier one was short of was mended, or it would not go on."""
    shortages = {
        rank: shortage
        for rank, shortage in read_shortages(folder, files, loaded.notes).items()
        if run is not None
        and shortage.run_id == run.run_id
        and shortage.attempt == max((attempt.attempt for attempt in run.attempts), default=0)
    }
    return shortage_lines(shortages, partial(_records_of, files, loaded.source), files)


def _stacks_of(files: dict[int, RankFile], notes: list[str], rank: int) -> Stacks:
    file = files[rank]
    return joined(read_stacks(file.path.with_name(stacks_name(rank)), file.run_id, notes))


def _sites_of(files: dict[int, RankFile], notes: list[str], rank: int) -> CallSites | None:
    file = files[rank]
    return read_beside(file.path.with_name(sites_name(rank)), CallSites, file.run_id, notes)


def _missing_beside(ranks: Iterable[RankFile], names: set[str]) -> Iterator[str]:
    """A note per kind of file that some of the ranks have and others have not."""
    for name_of in (stacks_name, sites_name):
        absent = [rank.rank for rank in ranks if name_of(rank.rank) not in names]
        if absent and any(name_of(rank.rank) in names for rank in ranks):
            more = f" and {len(absent) - 1} more" if len(absent) > 1 else ""
            yield f"{name_of(absent[0])}{more} is missing, other ranks have theirs"


def _kernels_of(files: dict[int, RankFile], rank: int) -> Iterator[tuple[int, list[NamedSpan]]]:
    """Of the steps whose lines keep every kernel."""
    names = kernel_names_beside(files[rank].path)
    for record in _records_of(files, "kernels", rank):
        if record.kernels is not None and record.kernels.spans is not None:
            yield record.global_step, named_spans(record, names)


def _kernel_names(paths: Iterable[Path]) -> set[str]:
    return {name for path in paths for name in kernel_names_beside(path)}


def _forget_calls(ranks: list[RankFile]) -> None:
    for rank in ranks:
        for steps in rank.sources.values():
            steps.calls = None


def _columns_of(files: dict[int, RankFile], source: Source, rank: int) -> Iterator[StepTable]:
    """The numbers of _records_of, from columns where there are some."""
    done = files[rank].sources[source]
    for block in blocks_with_unwritten(files[rank].path, [], whole=True, left_out=files[rank].left_out):
        if source not in block.sources():
            continue
        of_source = block.of_source(source)
        place, counts = places_of(of_source.integers("global_step"), done)
        for name in ("attempt", "rollbacks"):
            counts &= getattr(done, name)[place] == of_source.integers(name)
        if counts.any():
            yield of_source.chosen(counts)


def _records_of(files: dict[int, RankFile], source: Source, rank: int) -> Iterator[StepRecord]:
    """Records of a rank; of steps that were done more than once, those that count."""
    done = files[rank].sources[source]
    passes = dict(
        zip(
            done.global_step.tolist(),
            zip(done.attempt.tolist(), done.rollbacks.tolist(), strict=True),
            strict=True,
        )
    )
    return (
        record
        for record in with_unwritten(files[rank].path, [], left_out=files[rank].left_out)
        if record.source == source and passes.get(record.global_step) == (record.attempt, record.rollbacks)
    )
