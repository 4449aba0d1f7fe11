"""A run with some of its steps and ranks alone."""

from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping
from typing import Any, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from aorta.account.model import Run
from aorta.errors import ReportError

MOST_NUMBERS = 1 << 20
"""Ranks times steps that causes are looked for in at once: 220 MB for a million."""

FEWEST_STEPS = 4
TWICE = 2.0


def selected(run: Run, steps: tuple[int, int] | None, ranks: Collection[int] | None) -> Run:
    """steps: first and last global step. ReportError where nothing is left."""
    rows = [i for i, rank in enumerate(run.ranks) if ranks is None or rank in ranks]
    missing = sorted(set(ranks or ()) - set(run.ranks))
    if missing or not rows:
        raise ReportError(f"{run.path} has ranks {run.ranks[0]} to {run.ranks[-1]}, and no rank {missing[0]}")
    low, high = steps if steps is not None else (int(run.global_step[0]), int(run.global_step[-1]))
    columns = np.flatnonzero((run.global_step >= low) & (run.global_step <= high))
    if not len(columns):
        raise ReportError(
            f"{run.path} has steps {run.global_step[0]} to {run.global_step[-1]}, none from {low} to {high}"
        )
    return msgspec.structs.replace(_part(run, np.array(rows), columns), other_sources={})


def looked_at(judged: Run) -> Run:
    """The judged steps that the account is made of: those whose parts are known on every rank, without a
    last one that holds the program's end; of a run of many ranks and steps the last ones, MOST_NUMBERS of all
    ranks together. Where the parts of steps that the overhead left out are known too, and these are the most,
    those alone. judged itself where that is all of them.
    """
    return judged.once("looked_at", lambda: _looked_at(judged))


def _looked_at(run: Run) -> Run:
    first = _first_looked_at(run)
    is_known = np.ones(run.num_steps - first, dtype=bool)
    for name in ("step_ms", "compute_ms", "exposed_ms"):
        if name in run.metrics:
            is_finite = np.isfinite(run.metrics[name][:, first:]).all(axis=0)
            if (is_known & is_finite).any():
                is_known &= is_finite
    is_known[-1] &= not last_holds_the_end(run)
    is_left_out = is_known & run.left_out[first:]
    if 2 * is_left_out.sum() >= is_known.sum():  # recording makes the others longer
        is_known = is_left_out if is_left_out.any() else is_known
    if first == run.num_warmup and is_known.all():
        return run
    before = [first - 1] if first else []  # what lies behind a step's body delays the next step
    columns = np.array([*before, *(first + np.flatnonzero(is_known)).tolist()], dtype=np.intp)
    return msgspec.structs.replace(_part(run, ALL, columns), num_warmup=len(before), whole=run)


def _first_looked_at(judged: Run) -> int:
    num_steps = max(MOST_NUMBERS // len(judged.ranks), 1)
    return max(judged.num_warmup, judged.num_steps - num_steps)


def last_holds_the_end(judged: Run) -> bool:
    """Whether the last step is over twice as long as any other: no step came after it to end it, so that it
    holds what the program does at its end, such as a last checkpoint."""
    longest = np.nan_to_num(judged.metrics["step_ms"][:, _first_looked_at(judged) :]).max(axis=0)
    return len(longest) > FEWEST_STEPS and float(longest[-1]) > TWICE * float(longest[:-1].max())


def stretches(judged: Run) -> Iterator[Run]:
    """The whole run in order, its warm-up too, MOST_NUMBERS of all ranks at a time."""
    num_steps = max(MOST_NUMBERS // len(judged.ranks), 1)
    for first in range(0, judged.num_steps, num_steps):
        columns = np.arange(first, min(first + num_steps, judged.num_steps))
        yield msgspec.structs.replace(_part(judged, ALL, columns), num_warmup=0)


ALL = slice(None)


def _part(run: Run, rows: NDArray[np.intp] | slice, columns: NDArray[np.intp]) -> Run:
    """The run with the ranks in these rows and the steps in these columns. Arrays of metrics are read when
    they are asked for."""
    ranks = [run.ranks[i] for i in np.arange(len(run.ranks))[rows]]

    def part(values: NDArray[Any], of: NDArray[np.intp] = columns) -> NDArray[Any]:
        return values[rows][:, of]

    arrivals = run.arrivals
    if arrivals is not None:
        arrivals = msgspec.structs.replace(
            arrivals,
            num_last=part(arrivals.num_last),
            num_judged=part(arrivals.num_judged),
            caused_ms=part(arrivals.caused_ms),
            waits={rank: arrivals.waits[rank] for rank in ranks},
        )
    kept = (np.cumsum(run.has_collectives) - 1)[columns[run.has_collectives[columns]]]
    names = ("count", "duration_ms", "wait_ms", "transfer_ms")
    return msgspec.structs.replace(
        run,
        ranks=ranks,
        global_step=run.global_step[columns],
        start_unix_ns=part(run.start_unix_ns),
        metrics=cast(MutableMapping[str, NDArray[np.float64]], _Parts(run.metrics, part)),
        num_collectives=part(run.num_collectives),
        host_bound=part(run.host_bound),
        has_details=run.has_details[columns],
        has_collectives=run.has_collectives[columns],
        left_out=run.left_out[columns],
        collectives=[
            msgspec.structs.replace(kind, **{name: part(getattr(kind, name), kept) for name in names})
            for kind in run.collectives
        ],
        arrivals=arrivals,
        host_parts=_Parts(run.host_parts, part),
    )


class _Parts(Mapping[str, NDArray[np.float64]]):
    """Parts of arrays, each read when it is asked for."""

    def __init__(
        self,
        arrays: Mapping[str, NDArray[np.float64]],
        part: Callable[[NDArray[np.float64]], NDArray[np.float64]],
    ) -> None:
        self._arrays, self._part = arrays, part

    def __getitem__(self, name: str) -> NDArray[np.float64]:
        return self._part(self._arrays[name])

    def __contains__(self, name: object) -> bool:
        return name in self._arrays

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)
