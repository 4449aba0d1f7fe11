"""How a run ended, and what its lines lack, in words."""

import shlex
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

from aorta.account.load.again import records_of
from aorta.account.load.rank.columns import RankFile
from aorta.account.load.shortage import shortage_lines
from aorta.account.model import DAMAGED, MOST_DAMAGED, Run
from aorta.account.numbers import counted
from aorta.errors import RecordError, ReportError
from aorta.records.deaths import ending_of_status
from aorta.records.endings import attempt_ending, ending_text, why_of
from aorta.records.files import HANG_FOLDER
from aorta.records.launches import LaunchNote, died_early, read_notes
from aorta.records.lines import MISSING
from aorta.records.memory import read_shortages
from aorta.records.reader import read_run
from aorta.records.schema import AttemptRecord, Ending, RunRecord
from aorta.records.state import RankState, read_states

_MOST_NAMED = 6
LEAST_LEFT = 0.5
"""Share of the longest rank's steps below which what is left of a damaged run is refused: a short stretch is
not what the run was."""


def story(
    run: RunRecord | None,
    states: Iterable[RankState],
    ranks: Sequence[RankFile],
    notes: Sequence[LaunchNote] = (),
) -> list[str]:
    """Endings that are no plain finish, attempts, lost lines, steps that were not come to."""
    if run is None:
        return []
    lines: list[str] = []
    states = [state for state in states if state.process.run_id == run.run_id]
    if run.run_id is not None and run.attempts:
        last = run.attempts[-1]
        ending = last_ending(run, states, notes)
        lines += _ending(ending, last, ranks, run)
        lines += [_earlier(attempt) for attempt in run.attempts[:-1][-_MOST_NAMED:]]
        lines += _early(notes, states, run)
        if len(run.attempts) > 1:
            lines.append(f"this is one run of {len(run.attempts)} attempts, joined here")
    elif run.finished_unix_ns is None:
        lines.append("run.json records no end: the run was killed, or is still running")
    lines += _lost(run, states)
    return lines


def hang_line(folder: Path) -> list[str]:
    """That ranks of the run have reported a hang, and what names the one that they waited for."""
    reports = [path for path in (folder / HANG_FOLDER).glob("rank*.json") if path.is_file()]
    if not reports:
        return []
    told = f"aorta hang {shlex.quote(str(folder))} names the rank that was waited for"
    return [f"{counted(len(reports), 'rank')} reported that no step began any more: {told}"]


def _ending(
    ending: Ending | None, last: AttemptRecord, ranks: Sequence[RankFile], run: RunRecord
) -> Iterator[str]:
    last_step = _last_common_step(ranks)
    planned = planned_steps(run)
    step_text = "" if last_step is None else f" after step {last_step}"
    if planned is not None and last_step is not None:
        step_text += f" (planned: step {planned - 1})" if last_step < planned - 1 else ""
    if ending is None:
        yield f"still running{step_text}, or it ended without recording how"
    elif ending.kind != "finished":
        yield ending_text(ending, step_text)
    elif planned is not None and last_step is not None and last_step < planned - 1:
        yield f"finished{step_text}"


def last_ending(run: RunRecord, states: Iterable[RankState], notes: Sequence[LaunchNote]) -> Ending | None:
    """How the run's last attempt ended; None while it runs, and where nothing tells."""
    last = run.attempts[-1]
    current = [
        state
        for state in states
        if (state.process.run_id, state.process.attempt) == (run.run_id, last.attempt)
    ]
    if any(state.process.ending is None and state.is_alive for state in current):
        return None
    return attempt_ending(current, last.world_size, notes=notes) or last.ending


def _early(notes: Sequence[LaunchNote], states: Sequence[RankState], run: RunRecord) -> Iterator[str]:
    """Starts that the launcher saw fail before their processes trained."""
    pids = [state.process.pid for state in states]
    early = died_early(notes, pids, [attempt.started_unix_ns for attempt in run.attempts])
    for event in early[:_MOST_NAMED]:
        reason = why_of(ending_of_status(event.code, "the launcher", event.unix_ns, event.why))
        rank = "" if event.rank is None else f" of rank {event.rank}"
        yield f"a start ended before its first step: the process{rank} with {reason}"


def _earlier(attempt: AttemptRecord) -> str:
    steps = [step for step in attempt.last_steps if step is not None]
    reach = ""
    if attempt.first_step is not None and steps:
        reach = f", steps {attempt.first_step} to {max(steps)}"
    ending = "how it ended was not recorded" if attempt.ending is None else ending_text(attempt.ending)
    if attempt.attempt and attempt.position_by is None and attempt.first_step is not None:
        reach += ", position unknown: counted on"
    return f"attempt {attempt.attempt} ({counted(attempt.world_size, 'rank')}{reach}): {ending}"


def _lost(run: RunRecord, states: Iterable[RankState]) -> Iterator[str]:
    lost = {s.rank: s.lines for s in states if s.lines is not None and s.lines.num_lost}
    for rank, lines in list(lost.items())[:_MOST_NAMED]:
        reason = f": {lines.why_lost}" if lines.why_lost else ""
        yield f"rank {rank}: {lines.num_lost} of {lines.num_steps} steps could not be written{reason}"
    for name, text in (("lost_lines", "lines were lost"), ("unresolved_steps", "steps were not resolved")):
        num = run.coverage.get(name)
        if isinstance(num, int) and num > 0 and not (name == "lost_lines" and lost):
            yield f"rank {run.coverage.get('rank', 0)}: {num} {text}"


def cut(
    run: RunRecord | None, states: Iterable[RankState], ranks: Sequence[RankFile]
) -> Iterator[tuple[str, int]]:
    """Ranks whose lines end before the last one that they had written, or lack some of these, each with the
    number of these."""
    if run is None or len(run.attempts) != 1:
        return
    by_rank = {state.rank: state.lines for state in states if state.process.run_id == run.run_id}
    for rank in ranks:
        lines = by_rank.get(rank.rank)
        end = _last_common_step([rank])
        if lines is None or lines.closed_unix_ns is None or lines.num_lost or lines.last_step is None:
            continue
        if end is not None and end < lines.last_step:
            text = f"rank {rank.rank} had recorded up to step {lines.last_step}, its file ends at step {end}"
            yield text, lines.num_steps
        yield from ((note, lines.num_steps) for note in rank.notes if MISSING.search(note))


def _last_common_step(ranks: Sequence[RankFile]) -> int | None:
    lasts = [
        max((int(c.global_step[-1]) for c in rank.sources.values() if len(c.global_step)), default=None)
        for rank in ranks
    ]
    written = [last for last in lasts if last is not None]
    return min(written, default=None)


def planned_steps(run: RunRecord) -> int | None:
    """Steps that the settings of a run of train.py ask for."""
    config = run.config or {}
    training, data = config.get("training"), config.get("data")
    if not isinstance(training, dict):
        return None
    max_steps = training.get("max_steps")
    if isinstance(max_steps, int):
        return max_steps
    epochs = training.get("epochs")
    per_epoch = data.get("steps_per_epoch") if isinstance(data, dict) else None
    return epochs * per_epoch if isinstance(epochs, int) and isinstance(per_epoch, int) else None


# -- what is damaged, or was short ---------------------------------------------------------------------


def run_record(folder: Path, notes: list[str], strict: bool) -> tuple[RunRecord | None, list[str]]:
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


def damage_line(damage: list[str], run: Run, ranks: list[RankFile], num_written: int) -> str | None:
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
    read = [max(len(done.global_step) for done in rank.sources.values()) for rank in ranks]
    steps = max(num_written, *read)
    if run.num_steps < LEAST_LEFT * steps:
        short = [rank.path.name for rank, num in zip(ranks, read, strict=True) if num < LEAST_LEFT * steps]
        remedy = ""
        if 0 < len(short) < len(ranks):
            some = ", ".join(short[:MOST_DAMAGED]) + (", ..." if len(short) > MOST_DAMAGED else "")
            remedy = f"; without {some}, moved out of the folder, the other ranks can be read"
        left = f"{run.num_steps} of at least {steps} steps"
        raise ReportError(f"{damage[0]}: {DAMAGED}, and too little is left: {left}{remedy}")
    more = f" and {len(damage) - MOST_DAMAGED} more" if len(damage) > MOST_DAMAGED else ""
    left = f"{len(run.ranks)} of {size} ranks and {run.num_steps} of at least {steps} steps"
    return (
        f"{DAMAGED}: {'; '.join(damage[:MOST_DAMAGED])}{more}. The numbers are of what is left, {left}"
        " (--strict refuses it)"
    )


def died_early_text(folder: Path) -> list[str]:
    """How a run without a step ended or that it goes on, and what it was short of if that was memory."""
    states = read_states(folder)
    shortages = read_shortages(folder, states)
    current = {rank: one for rank, one in shortages.items() if one.run_id == states[rank].process.run_id}
    run, _ = run_record(folder, [], strict=False)
    return [
        *shortage_lines(current, lambda rank: (), states),
        *story(run, states.values(), (), read_notes(folder)),
    ]


def shortage_text(folder: Path, run: RunRecord | None, files: dict[int, RankFile], loaded: Run) -> list[str]:
    """Of the run's last attempt: what an earlier one was short of was mended, or it would not go on."""
    shortages = {
        rank: shortage
        for rank, shortage in read_shortages(folder, files, loaded.notes).items()
        if run is not None
        and shortage.run_id == run.run_id
        and shortage.attempt == max((attempt.attempt for attempt in run.attempts), default=0)
    }
    return shortage_lines(shortages, partial(records_of, files, loaded.source), files)
