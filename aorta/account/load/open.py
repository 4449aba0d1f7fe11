"""Opens a run: a folder of records, or traces, read rank by rank in as many processes as are asked for.

Details of single steps are read again when a picture or a page asks for them (again.py).
"""

from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from aorta.account.load.again import (
    columns_of_rank,
    kernel_names,
    kernels_of,
    missing_beside,
    records_of,
    sites_of,
    stacks_of,
    workers_of,
)
from aorta.account.load.assemble import RunArrays, RunFiles, assemble
from aorta.account.load.attempts import ranks_of_run
from aorta.account.load.ending import (
    cut,
    damage_line,
    died_early_text,
    hang_line,
    last_ending,
    run_record,
    shortage_text,
    story,
)
from aorta.account.load.evidence import comm_evidence, possible_of_records
from aorta.account.load.goodput import goodput, goodput_text
from aorta.account.load.rank.calls import MAX_CALLS
from aorta.account.load.rank.reduce import reduce_file, salvage
from aorta.account.load.waits import match_records
from aorta.account.model import Progress, Run
from aorta.errors import ReportError, TraceError
from aorta.processes import parallel_map, usual_jobs
from aorta.records.files import STEPS_FILE, files_beside
from aorta.records.launches import read_notes
from aorta.records.state import RankState, read_states

if TYPE_CHECKING:  # readers of traces take long to import
    from aorta.traces.steps import Reading


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
        from aorta.account.load.traces.open import load_traces
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
        return traces(path)
    except TraceError as error:
        place_text = "" if str(path) in str(error) else f"{path}: "
        raise TraceError(f"{place_text}{error}") from error


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
    arrays = RunArrays(len(paths))
    num_calls = 0
    results = parallel_map(reduce_file if strict else salvage, paths, jobs=jobs, dask=dask, error=ReportError)
    for num_read, rank in enumerate(results, start=1):
        if progress is not None:
            progress(label, num_read, len(paths))
        if isinstance(rank, str):
            notes.append(f"left out: {rank}")
            continue
        if rank.left_out:
            damage.append(f"parts of {rank.path.name}")
        arrays.add(rank)
        notes += rank.notes
        num_calls += sum(steps.num_calls for steps in rank.sources.values())
        if num_calls > MAX_CALLS:
            for read in arrays.ranks:
                for steps in read.sources.values():
                    steps.calls = None
    if num_calls > MAX_CALLS:
        notes.append(f"{num_calls} collectives are too many to match across ranks: waits are unknown")
    if not arrays.ranks:
        raise ReportError(f"{folder}: nothing is left to read: {notes[-1]}")
    ranks = ranks_of_run(folder, arrays.ranks, run, notes, strict)
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
            arrays=arrays,
            match=partial(match_records, on_one_host=_on_one_host(files, states)),
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
        *hang_line(folder),
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
        workers=partial(workers_of, files),
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
