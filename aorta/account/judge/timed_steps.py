"""Judged steps that were timed, and those in which the host was late."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from aorta.account.model import Run
from aorta.account.rows import row_blocks

BOUNDS_OF_HOST_BOUND = (
    "in these, compute, comm and hidden are upper bounds and exposed may be off either way"
    " (marks can fire before the kernels they stand for)"
)


def timed_steps(judged: Run) -> NDArray[np.bool_]:
    """[judged step]: some rank has numbers of compute or communication. Where times are taken in one
    step of many (--overhead), the other steps have no such numbers."""
    return judged.once("timed_steps", lambda: _timed_steps(judged))


def _timed_steps(judged: Run) -> NDArray[np.bool_]:
    is_timed = np.zeros(judged.num_judged, dtype=bool)
    for name in ("compute_ms", "comm_ms"):
        values = judged.values(name)
        for rows in row_blocks(values.shape):
            is_timed |= np.isfinite(values[rows]).any(axis=0)
    return is_timed


def values_where_timed(judged: Run, name: str) -> NDArray[np.float64]:
    """judged.values(name) without the steps that were not timed, for a metric that these do not have. They
    were left out by plan, whatever happened in them: what remains is a sample, and not a choice."""
    values = judged.values(name)
    return values[:, timed_steps(judged) | np.isfinite(values).any(axis=0)]


def host_bound_steps(judged: Run) -> int | None:
    """Judged steps in which some rank was host-bound; None where no rank knows."""
    host_bound = judged.host_bound[:, judged.judged_steps]
    return None if np.isnan(host_bound).all() else int((host_bound == 1).any(axis=0).sum())


def _num_known_host_bound(judged: Run) -> int:
    """Judged steps of which some rank knows whether it was host-bound."""
    return int((~np.isnan(judged.host_bound[:, judged.judged_steps])).any(axis=0).sum())


def host_bound_text(runs: Sequence[Run]) -> str:
    """Number of judged steps that were host-bound, and the effect on their numbers; '' where none was."""
    num_host_bound = sum(host_bound_steps(judged) or 0 for judged in runs)
    if num_host_bound == 0:
        return ""
    num_steps = sum(_num_known_host_bound(judged) for judged in runs)
    return f"host-bound: {num_host_bound} of {num_steps} steps; {BOUNDS_OF_HOST_BOUND}"
