"""Remarks on the numbers of a report: of how many steps they are, and whether these stand for the others."""

import numpy as np
from numpy.typing import NDArray

from aorta.account.judge.overhead import overhead_texts
from aorta.account.judge.timed_steps import timed_steps
from aorta.account.load.rank.kernels import graph_text
from aorta.account.model import Dataset
from aorta.account.numbers import number


def remarks(dataset: Dataset) -> list[str]:
    """Remarks on the numbers of a report, and on how many steps they are of."""
    lines = [
        text
        for text in (
            partly_timed(dataset),
            recorded_apart(dataset),
            graph_text(dataset),
        )
        if text
    ]
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


def _lengths(dataset: Dataset, is_recorded: NDArray[np.bool_]) -> str:
    step_ms = np.concatenate([np.median(judged.values("step_ms"), axis=0) for judged in dataset.runs])
    if np.isnan(step_ms).any():
        return ""
    if dataset.source == "host":
        own, others = (number(np.median(step_ms[which])) for which in (is_recorded, ~is_recorded))
        return f"; the recorded ones' median step takes {own} ms, the others' {others} ms"
    # The host runs ahead of the device: a left-out step, timed by the host, is short or waits for several.
    own, others = (number(np.mean(step_ms[which])) for which in (is_recorded, ~is_recorded))
    return f"; the recorded ones take {own} ms on average, the others {others} ms"
