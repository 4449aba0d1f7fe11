"""Judged steps that were timed, those in which the host was late, and what is said of both."""

from collections.abc import Sequence

import numpy as np

from aorta.account.judge.overhead import overhead_texts
from aorta.account.load.rank.kernels import graph_text
from aorta.account.model import Dataset, Run, once_of_run
from aorta.account.numbers import number
from aorta.account.rows import row_blocks
from aorta.timeline.arrays import Flags, Floats

BOUNDS_OF_HOST_BOUND = (
    "in these, compute, comm and hidden are upper bounds and exposed may be off either way"
    " (marks can fire before the kernels they stand for)"
)


@once_of_run
def timed_steps(judged: Run) -> Flags:
    """[judged step]: some rank has numbers of compute or communication. Where times are taken in one
    step of many (--overhead), the other steps have no such numbers."""
    is_timed = np.zeros(judged.num_judged, dtype=bool)
    for name in ("compute_ms", "comm_ms"):
        values = judged.values(name)
        for rows in row_blocks(values.shape):
            is_timed |= np.isfinite(values[rows]).any(axis=0)
    return is_timed


def values_where_timed(judged: Run, name: str) -> Floats:
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


def remarks(dataset: Dataset) -> list[str]:
    """Remarks on the numbers of a report, and on how many steps they are of."""
    lines = [*filter(None, (partly_timed(dataset), recorded_apart(dataset), graph_text(dataset)))]
    lines += overhead_texts(dataset)
    return lines


def partly_timed(dataset: Dataset) -> str:
    """Text of how many judged steps were timed, and whether these took as long as the others, which a share
    of the step is told by; '' where all were timed, or none."""
    is_timed = np.concatenate([timed_steps(judged) for judged in dataset.runs])
    if is_timed.all() or not is_timed.any():
        return ""
    return (
        f"only {is_timed.sum()} of {len(is_timed)} judged steps were recorded (--overhead):"
        " compute, communication and all numbers derived from them come from these steps"
        f"{_lengths(dataset, is_timed)}"
    )


def recorded_apart(dataset: Dataset) -> str:
    """Text of how many judged steps are not in the account because recording makes them longer, while all is
    known of the others too; '' where all are in it."""
    left_out = np.concatenate([judged.left_out[judged.judged_steps] for judged in dataset.runs])
    num = int((~left_out).sum())
    if partly_timed(dataset) or not 0 < num <= len(left_out) / 2:
        return ""
    return (
        f"{num} of {len(left_out)} judged steps were recorded with their details (--overhead) and are in no"
        f" mean, since that may make them longer{_lengths(dataset, ~left_out)}"
    )


def _lengths(dataset: Dataset, is_recorded: Flags) -> str:
    step_ms = np.concatenate([np.median(judged.values("step_ms"), axis=0) for judged in dataset.runs])
    if np.isnan(step_ms).any():
        return ""
    if dataset.source == "host":
        own, others = (number(np.median(step_ms[which])) for which in (is_recorded, ~is_recorded))
        return f"; the recorded ones' median step takes {own} ms, the others' {others} ms"
    # The host runs ahead of the device: a left-out step, timed by the host, is short or waits for several.
    own, others = (number(np.mean(step_ms[which])) for which in (is_recorded, ~is_recorded))
    return f"; the recorded ones take {own} ms on average, the others {others} ms"
