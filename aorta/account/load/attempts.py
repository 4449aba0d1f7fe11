"""The ranks of one run, over its attempts: which of their lines count, and what was done twice."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from aorta.account.load.rank.columns import IMPOSSIBLE, RankFile, RankSteps
from aorta.errors import ReportError
from aorta.records.files import STEPS_FILE
from aorta.records.rotation import DROPPED
from aorta.records.schema import RunRecord
from aorta.timeline.arrays import Ints
from aorta.timeline.types import OWN_SOURCES

_MOST_NAMED = 6
OF_ANOTHER_SIZE = "done by another number of ranks"
"""Why steps are missing; `_one_size` has named them."""


def ranks_of_run(
    folder: Path, ranks: list[RankFile], run: RunRecord | None, notes: list[str], strict: bool
) -> list[RankFile]:
    """The ranks in order, with the steps that count. ReportError where they are not of one run or, if strict,
    not all of its ranks."""
    ranks = _one_size(sorted(ranks, key=lambda rank: rank.rank), notes)
    _check_ranks(folder, ranks, run, strict)
    notes += _history(ranks)
    return ranks


def _one_size(ranks: list[RankFile], notes: list[str]) -> list[RankFile]:
    """The ranks with the steps of the number of ranks that did most of them; numbers of steps that were done
    by two ranks and by four do not go into one median. What is left out is noted."""
    steps_of_size: dict[int, set[int]] = {}
    for rank in ranks:
        for done in rank.sources.values():
            for size in np.unique(done.world_size).tolist():
                steps = done.global_step[done.world_size == size]
                steps_of_size.setdefault(size, set()).update(steps.tolist())
    has_attempts = any((done.attempt > 0).any() for rank in ranks for done in rank.sources.values())
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


def _of_size(rank: RankFile, size: int) -> RankFile:
    sources = {
        source: done.chosen(done.world_size == size, OF_ANOTHER_SIZE)
        for source, done in rank.sources.items()
        if (done.world_size == size).any()
    }
    return replace(rank, world_size=size, sources=sources)


def _check_ranks(folder: Path, ranks: list[RankFile], run: RunRecord | None, strict: bool) -> None:
    names = sorted({rank.run_id for rank in ranks if rank.run_id is not None})
    if run is not None and run.run_id is not None and names and run.run_id not in names:
        names.append(run.run_id)
    if len(names) > 1:
        raise ReportError(f"{folder} mixes runs {' and '.join(names[:4])}; keep one run in a folder")
    is_other_attempt = run is not None and len(run.attempts) > 1
    sizes = sorted(
        {rank.world_size for rank in ranks} | ({run.world_size} if run and not is_other_attempt else set())
    )
    if len(sizes) > 1:
        raise ReportError(
            f"{folder} mixes runs of {' and '.join(map(str, sizes))} ranks; keep one run in a folder"
        )
    by_rank: dict[int, Path] = {}
    for rank_file in ranks:
        named = STEPS_FILE.fullmatch(rank_file.path.name)
        if rank_file.rank in by_rank:
            raise ReportError(
                f"{folder}: rank {rank_file.rank} appears twice, in {by_rank[rank_file.rank]}"
                f" and {rank_file.path}"
            )
        if named is None or int(named[1]) != rank_file.rank:
            raise ReportError(f"{rank_file.path} holds records of rank {rank_file.rank}")
        by_rank[rank_file.rank] = rank_file.path
    missing = [rank for rank in range(min(sizes[0], 1_000_000)) if rank not in by_rank]
    if missing and strict:
        missing_text = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
        raise ReportError(f"{folder} lacks rank {missing_text} of {sizes[0]}")
    if max(by_rank) >= sizes[0]:
        raise ReportError(f"{folder} holds rank {max(by_rank)} of a run of {sizes[0]} ranks")


def _history(ranks: Sequence[RankFile]) -> Iterator[str]:
    """Lines on steps that were done twice, and where steps are missing on purpose or not; in words, of rank
    0's own lines."""
    if not ranks or not ranks[0].sources:
        return
    done = max(ranks[0].sources.values(), key=lambda done: len(done.global_step))
    by_cause: dict[tuple[str, str], list[int]] = {}
    last_passes = done.passes
    for step, earlier in done.repeated.items():
        if step in last_passes:
            cause = (_pass(earlier[-1], last_passes[step]), _pass(last_passes[step], earlier[-1]))
            by_cause.setdefault(cause, []).append(step)
    for (cause_before, cause_after), steps in by_cause.items():
        verb = "was" if len(steps) == 1 else "were"
        times = f"{verb} done {cause_before} and again {cause_after}"
        yield f"{_steps(sorted(steps))} {times}: the last time counts"
    yield from _gaps(done, _own_steps(ranks[0]))


def _own_steps(rank: RankFile) -> Ints:
    """Steps that the run itself has a line of, whatever timed them."""
    steps_by_source = [done.global_step for source, done in rank.sources.items() if source in OWN_SOURCES]
    return np.unique(np.concatenate(steps_by_source)) if steps_by_source else np.empty(0, dtype=np.int64)


def _pass(earlier: tuple[int, int], later: tuple[int, int]) -> str:
    if earlier[0] != later[0]:
        return f"in attempt {earlier[0]}"
    return "after a rollback" if earlier > later else "before it"


def _gaps(done: RankSteps, own_steps: Ints) -> Iterator[str]:
    """own: steps with a line of the run's own; a trace's lines are of few steps, and nothing is missing."""
    steps = own_steps if len(own_steps) else done.global_step
    jumps = np.diff(steps)
    reasons = dict(done.gaps)
    causes: dict[str, int] = {}
    for step, reason in done.gaps:
        if reason.startswith(DROPPED):
            yield f"before step {step} {reason}"
        elif reason not in (OF_ANOTHER_SIZE, IMPOSSIBLE) and not reason.startswith("rolled back"):
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
        yield f"no line of global step {places}{ellipsis}, and no record says why"


def _steps(steps: Sequence[int]) -> str:
    if len(steps) == 1:
        return f"step {steps[0]}"
    if steps[-1] - steps[0] == len(steps) - 1:
        return f"steps {steps[0]} to {steps[-1]}"
    return f"{len(steps)} steps between {steps[0]} and {steps[-1]}"
