"""A run over its attempts: which of its lines count, what was done twice, how it ended."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from aorta.records.rotation import DROPPED
from aorta.records.schema import AttemptRecord, Ending, RunRecord
from aorta.records.state import RankState, attempt_ending, ending_text, read_states
from aorta.timeline.types import OWN_SOURCES

if TYPE_CHECKING:
    from aorta.report.load.rank.columns import Passes, RankColumns, RankFile, SourceColumns

Ints = NDArray[np.int64]
_MOST_NAMED = 6
OF_ANOTHER_SIZE = "done by another number of ranks"
"""Why steps are missing; `one_size` has named them."""


def one_size(ranks: "list[RankFile]", notes: list[str]) -> "list[RankFile]":
    """The ranks with the steps of the number of ranks that did most of them; numbers of steps that were done
    by two ranks and by four do not go into one median. What is left out is noted."""
    steps_of_size: dict[int, set[int]] = {}
    for rank in ranks:
        for columns in rank.columns.values():
            for size in np.unique(columns.passes.world_size).tolist():
                steps = columns.global_step[columns.passes.world_size == size]
                steps_of_size.setdefault(size, set()).update(steps.tolist())
    has_attempts = any((c.passes.attempt > 0).any() for rank in ranks for c in rank.columns.values())
    if len(steps_of_size) < 2 or not has_attempts:
        return ranks
    size = max(steps_of_size, key=lambda size: (len(steps_of_size[size]), size))
    for old_size in sorted(steps_of_size):
        if old_size != size:
            steps = sorted(steps_of_size[old_size])
            notes.append(
                f"{_steps(steps)} were done by {old_size} ranks and are left out: the others by {size}"
            )
    return [_of_size(rank, size) for rank in ranks if rank.rank < size]


def _of_size(rank: "RankFile", size: int) -> "RankFile":
    columns = {source: _chosen(c, c.passes.world_size == size) for source, c in rank.columns.items()}
    return replace(rank, world_size=size, columns={s: c for s, c in columns.items() if len(c.global_step)})


def _chosen(columns: "SourceColumns", rows: NDArray[np.bool_]) -> "SourceColumns":
    from aorta.report.load.rank.stored import StoredColumns

    if rows.all():
        return columns
    if not isinstance(columns, StoredColumns):
        return _chosen_in_memory(columns.load(), rows)
    return replace(
        columns,
        global_step=columns.global_step[rows],
        passes=_chosen_passes(columns.passes, rows, columns.global_step),
        has_collectives=columns.has_collectives[rows],
        choose=(*columns.choose, partial(_chosen_in_memory, rows=rows)),
    )


def _chosen_passes(passes: "Passes", rows: NDArray[np.bool_], steps: Ints) -> "Passes":
    """With the reason why steps are missing before a row that is chosen and follows one that is not."""
    after_others = steps[1:][rows[1:] & ~rows[:-1]].tolist()
    return replace(
        passes,
        attempt=passes.attempt[rows],
        rollbacks=passes.rollbacks[rows],
        world_size=passes.world_size[rows],
        gaps=[*passes.gaps, *((step, OF_ANOTHER_SIZE) for step in after_others)],
    )


def _chosen_in_memory(columns: "RankColumns", rows: NDArray[np.bool_]) -> "RankColumns":
    place = np.where(rows, np.cumsum(rows) - 1, -1).astype(np.int32)
    return replace(
        columns,
        global_step=columns.global_step[rows],
        start_ns=columns.start_ns[rows],
        end_ns=columns.end_ns[rows],
        tolerance_ns=columns.tolerance_ns[rows],
        metrics={name: values[rows] for name, values in columns.metrics.items()},
        num_collectives=columns.num_collectives[rows],
        host_bound=columns.host_bound[rows],
        has_details=columns.has_details[rows],
        has_collectives=columns.has_collectives[rows],
        has_exposed=columns.has_exposed[rows],
        collectives={key: (a[rows], b[rows]) for key, (a, b) in columns.collectives.items()},
        calls=None if columns.calls is None else columns.calls.moved(place),
        passes=_chosen_passes(columns.passes, rows, columns.global_step),
    )


def history(ranks: "Sequence[RankFile]") -> Iterator[str]:
    """Lines on steps that were done twice, and where steps are missing on purpose or not; in words, of rank
    0's own lines."""
    if not ranks or not ranks[0].columns:
        return
    columns = max(ranks[0].columns.values(), key=lambda columns: len(columns.global_step))
    passes = columns.passes
    by_cause: dict[tuple[str, str], list[int]] = {}
    last_passes = dict(
        zip(
            columns.global_step.tolist(),
            zip(passes.attempt.tolist(), passes.rollbacks.tolist(), strict=True),
            strict=True,
        )
    )
    for step, earlier in passes.repeated.items():
        if step in last_passes:
            cause = (_pass(earlier[-1], last_passes[step]), _pass(last_passes[step], earlier[-1]))
            by_cause.setdefault(cause, []).append(step)
    for (cause_before, cause_after), steps in by_cause.items():
        verb = "was" if len(steps) == 1 else "were"
        times = f"{verb} done {cause_before} and again {cause_after}"
        yield f"{_steps(sorted(steps))} {times}: the last time counts"
    yield from _gaps(columns, own_steps(ranks[0]))


def own_steps(rank: "RankFile") -> Ints:
    """Steps that the run itself has a line of, whatever timed them."""
    steps_by_source = [
        columns.global_step for source, columns in rank.columns.items() if source in OWN_SOURCES
    ]
    return np.unique(np.concatenate(steps_by_source)) if steps_by_source else np.empty(0, dtype=np.int64)


def _pass(earlier: tuple[int, int], later: tuple[int, int]) -> str:
    if earlier[0] != later[0]:
        return f"in attempt {earlier[0]}"
    return "after a rollback" if earlier > later else "before it"


def _gaps(columns: "SourceColumns", own_steps: Ints) -> Iterator[str]:
    """own: steps with a line of the run's own; a trace's lines are of few steps, and nothing is missing."""
    steps = own_steps if len(own_steps) else columns.global_step
    jumps = np.diff(steps)
    reasons = dict(columns.passes.gaps)
    causes: dict[str, int] = {}
    for step, reason in columns.passes.gaps:
        if reason.startswith(DROPPED):
            yield f"before step {step} {reason}"
        elif reason != OF_ANOTHER_SIZE and not reason.startswith("rolled back"):
            causes[reason] = causes.get(reason, 0) + 1
    for reason, num in list(causes.items())[:_MOST_NAMED]:
        yield f"steps are missing on purpose: {reason}" + (f" ({num} times)" if num > 1 else "")
    usual = int(np.median(jumps)) if len(jumps) else 1
    lone = [
        (int(a) + 1, int(b) - 1)
        for a, b, jump in zip(steps[:-1], steps[1:], jumps, strict=True)
        if jump > usual and int(b) not in reasons
    ]
    if lone:
        places = ", ".join(f"{a}" if a == b else f"{a} to {b}" for a, b in lone[:_MOST_NAMED])
        ellipsis = ", ..." if len(lone) > _MOST_NAMED else ""
        yield f"no line of global step {places}{ellipsis}, and none says why"


def _steps(steps: Sequence[int]) -> str:
    if len(steps) == 1:
        return f"step {steps[0]}"
    if steps[-1] - steps[0] == len(steps) - 1:
        return f"steps {steps[0]} to {steps[-1]}"
    return f"{len(steps)} steps between {steps[0]} and {steps[-1]}"


# ---- how it went ---------------------------------------------------------------------------------


def story(folder: Path, run: RunRecord | None, ranks: "Sequence[RankFile]") -> list[str]:
    """Endings that are no plain finish, attempts, lost lines, steps that were not come to."""
    if run is None:
        return []
    lines: list[str] = []
    states = [s for s in read_states(folder).values() if s.process.run_id == run.run_id]
    if run.run_id is not None and run.attempts:
        last = run.attempts[-1]
        current = [state for state in states if state.process.attempt == last.attempt]
        ending = attempt_ending(current, last.world_size) or last.ending
        if current and any(state.process.ending is None and state.is_alive for state in current):
            ending = None
        lines += _ending(ending, last, ranks, run)
        lines += [_earlier(attempt) for attempt in run.attempts[:-1][-_MOST_NAMED:]]
        if len(run.attempts) > 1:
            lines.append(f"{len(run.attempts)} attempts are joined here, this is one run")
    elif run.finished_unix_ns is None:
        lines.append("run.json has no end: the run was cut off, or is still going on")
    lines += _lost(run, states)
    lines += _cut(run, states, ranks)
    return lines


def _ending(
    ending: Ending | None, last: AttemptRecord, ranks: "Sequence[RankFile]", run: RunRecord
) -> Iterator[str]:
    last_step = _last_common_step(ranks)
    planned = planned_steps(run)
    step_text = "" if last_step is None else f" after step {last_step}"
    if planned is not None and last_step is not None:
        step_text += f" (the last would have been {planned - 1})" if last_step < planned - 1 else ""
    if ending is None:
        yield f"still running{step_text}, or nothing tells how it ended"
    elif ending.kind != "finished":
        yield ending_text(ending, step_text)
    elif planned is not None and last_step is not None and last_step < planned - 1:
        yield f"finished{step_text}"


def _earlier(attempt: AttemptRecord) -> str:
    steps = [step for step in attempt.last_steps if step is not None]
    reach = ""
    if attempt.first_step is not None and steps:
        reach = f", steps {attempt.first_step} to {max(steps)}"
    ending = "nothing tells how it ended" if attempt.ending is None else ending_text(attempt.ending)
    return f"attempt {attempt.attempt} ({attempt.world_size} ranks{reach}): {ending}"


def _lost(run: RunRecord, states: Iterable[RankState]) -> Iterator[str]:
    lost = {s.rank: s.lines for s in states if s.lines is not None and s.lines.num_lost}
    for rank, lines in list(lost.items())[:_MOST_NAMED]:
        reason = f": {lines.why_lost}" if lines.why_lost else ""
        yield f"rank {rank}: {lines.num_lost} of {lines.num_steps} steps could not be written{reason}"
    for name, text in (("lost_lines", "lines were lost"), ("unresolved_steps", "steps were not resolved")):
        num = run.coverage.get(name)
        if isinstance(num, int) and num > 0 and not (name == "lost_lines" and lost):
            yield f"rank {run.coverage.get('rank', 0)}: {num} {text}"


def _cut(run: RunRecord, states: Iterable[RankState], ranks: "Sequence[RankFile]") -> Iterator[str]:
    """Ranks whose lines end before the last one that they had written."""
    by_rank = {state.rank: state.lines for state in states}
    for rank in ranks:
        lines = by_rank.get(rank.rank)
        end = _last_common_step([rank])
        if lines is None or lines.closed_unix_ns is None or lines.num_lost or lines.last_step is None:
            continue
        if len(run.attempts) == 1 and end is not None and end < lines.last_step:
            yield f"rank {rank.rank} had written lines up to step {lines.last_step}, they end at step {end}"


def _last_common_step(ranks: "Sequence[RankFile]") -> int | None:
    lasts = [
        max((int(c.global_step[-1]) for c in rank.columns.values() if len(c.global_step)), default=None)
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
