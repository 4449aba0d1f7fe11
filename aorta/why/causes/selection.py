"""A run with some of its steps and ranks alone."""

from collections.abc import Collection, Iterator, Mapping, MutableMapping
from typing import cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from aorta.account.model import Arrivals, JudgedRun, Run
from aorta.errors import ReportError

MOST_NUMBERS = 1 << 20
"""Ranks times steps that causes are looked for in at once: 220 MB for a million."""


def selected(run: Run, steps: tuple[int, int] | None, ranks: Collection[int] | None) -> Run:
    """steps: first and last global step. ReportError where nothing is left."""
    rows = [i for i, rank in enumerate(run.ranks) if ranks is None or rank in ranks]
    missing = sorted(set(ranks or ()) - set(run.ranks))
    if missing or not rows:
        raise ReportError(
            f"{run.path} has ranks {run.ranks[0]} to {run.ranks[-1]}, and no rank {missing[:4]}"
        )
    low, high = steps if steps is not None else (int(run.global_step[0]), int(run.global_step[-1]))
    columns = np.flatnonzero((run.global_step >= low) & (run.global_step <= high))
    if not len(columns):
        raise ReportError(
            f"{run.path} has steps {run.global_step[0]} to {run.global_step[-1]}, none from {low} to {high}"
        )
    place = np.ix_(np.array(rows), columns)
    arrivals = run.arrivals
    if arrivals is not None:
        arrivals = Arrivals(
            arrivals.num_last[place],
            arrivals.num_judged[place],
            arrivals.caused_ms[place],
            {run.ranks[i]: arrivals.waits[run.ranks[i]] for i in rows},
            arrivals.residual_us,
        )
    return msgspec.structs.replace(
        run,
        ranks=[run.ranks[i] for i in rows],
        global_step=run.global_step[columns],
        start_unix_ns=run.start_unix_ns[place],
        metrics={name: values[place] for name, values in run.metrics.items()},
        num_collectives=run.num_collectives[place],
        host_bound=run.host_bound[place],
        has_details=run.has_details[columns],
        has_collectives=run.has_collectives[columns],
        collectives=[],
        arrivals=arrivals,
        host_parts={name: values[place] for name, values in run.host_parts.items()},
        other_sources={},
    )


def last_steps(judged: JudgedRun) -> JudgedRun:
    """The last judged steps, as many as all ranks have MOST_NUMBERS of together; the run itself where it has
    no more. One step before them is its warm-up, since what lies behind a step's body delays the next one."""
    run = judged.run
    num_steps = max(MOST_NUMBERS // len(run.ranks), 1)
    if judged.num_steps <= num_steps:
        return judged
    first = run.num_steps - num_steps - 1
    arrivals = run.arrivals
    if arrivals is not None:
        arrivals = msgspec.structs.replace(
            arrivals,
            num_last=arrivals.num_last[:, first:],
            num_judged=arrivals.num_judged[:, first:],
            caused_ms=arrivals.caused_ms[:, first:],
        )
    return msgspec.structs.replace(
        judged,
        num_warmup=1,
        run=msgspec.structs.replace(
            run,
            global_step=run.global_step[first:],
            start_unix_ns=run.start_unix_ns[:, first:],
            metrics=cast(MutableMapping[str, NDArray[np.float64]], _Columns(run.metrics, first)),
            num_collectives=run.num_collectives[:, first:],
            host_bound=run.host_bound[:, first:],
            has_details=run.has_details[first:],
            has_collectives=run.has_collectives[first:],
            arrivals=arrivals,
            host_parts=_Columns(run.host_parts, first),
        ),
    )


class _Columns(Mapping[str, NDArray[np.float64]]):
    """Arrays from a column on, each read when it is asked for."""

    def __init__(self, arrays: Mapping[str, NDArray[np.float64]], first: int) -> None:
        self._arrays, self._first = arrays, first

    def __getitem__(self, name: str) -> NDArray[np.float64]:
        return self._arrays[name][:, self._first :]

    def __contains__(self, name: object) -> bool:
        return name in self._arrays

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)
