"""A run with some of its steps and ranks alone."""

from collections.abc import Collection
from dataclasses import replace

import numpy as np

from aorta.errors import ReportError
from aorta.report.model import Arrivals, Run


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
    return replace(
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
