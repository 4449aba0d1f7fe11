"""The step time in each state that steps were in, where what changed is not the same in all of them.

A save that takes twice as long, or a kernel that is slow for long sequences alone, is little of the typical
step. And where one side was in a state more often, that may be all that changed. States exclude each other:
what the host did in a step (STATES), else a low clock, else how many tokens it had. A state's steps are taken
together where both sides were in it, else in the order of each run.
"""

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from aorta.account.judge.alike import MAIN
from aorta.account.judge.pairing import STATES, Floats, Mask, Pairs, column, in_state, pairs
from aorta.account.judge.sentences import percent, percent_interval
from aorta.account.metrics import WORK
from aorta.account.model import ConfidenceInterval, Dataset, Run
from aorta.timeline.ratio import Decision, LogRatio, Spread, decided
from aorta.timeline.statistics import ALPHA

CLOCK = "sm_clock_mhz"
LOW_CLOCK = 0.97
"""Of the highest clock that either side had, below which a step's is low."""
MOVED = 0.1
"""Share of the steps by which a state's part differs, from which on it may be what changed."""
FEW_SIZES = 4
"""Steps of more sizes than these are put together in thirds."""
WORDS: dict[Decision, str] = {
    "higher": "slower", "lower": "faster", "same": "the same", "cannot tell": "cannot tell"
}  # fmt: skip


class _State(NamedTuple):
    name: str
    num: tuple[float, float]
    """Steps of a run that were in it, on either side."""
    ratio: LogRatio | None
    """None where too few were."""
    decision: Decision
    is_judged: bool
    """False: single runs do not tell how long a save or a collection takes in others."""

    @property
    def text(self) -> str:
        steps = " and ".join(dict.fromkeys(f"{num:.0f}" for num in self.num))
        if self.ratio is None:
            return f"{self.name} ({steps} steps): not judged"
        low, high = (math.exp(end) for end in self.ratio.interval(ALPHA))
        change = f"{percent(math.exp(self.ratio.value))}{percent_interval(ConfidenceInterval(low, high))}"
        words = WORDS[self.decision] if self.is_judged else "in these runs"
        return f"{self.name} ({steps} steps): {words}, {change}"


def states_text(
    reference: Dataset, candidate: Dataset, whole: Pairs, matters: float, spread: Spread | None
) -> str:
    """A sentence with the verdict in each state; '' where states do not differ."""
    if not whole.is_log or whole.num_varying < 2:
        return ""
    sides = (reference, candidate)
    labels = _labels([run for side in sides for run in side.runs])
    total = sum(map(len, labels.values())) / len(labels)
    has_several = min(len(side.runs) for side in sides) > 1
    found = []
    for name in dict.fromkeys(np.concatenate(list(labels.values())).tolist()):

        def is_in(judged: Run, name: str = name) -> Mask:
            mask: Mask = labels[id(judged)] == name
            return mask

        num = [float(np.mean([is_in(run).sum() for run in side.runs])) for side in sides]
        taken = pairs(reference, candidate, MAIN, is_in)
        ratio = taken.ratio(spread) if taken is not None and taken.is_log else None
        decision = "cannot tell" if ratio is None else decided(*_of(ratio), matters)[0]
        is_judged = has_several or name not in STATES.values()
        found.append(_State(name, (num[0], num[1]), ratio, decision, is_judged))
    found.sort(key=lambda state: -sum(state.num))
    is_moved = max(abs(state.num[0] - state.num[1]) for state in found) > MOVED * total
    of_whole = decided(*_of(whole.ratio(spread)), matters)[0]
    is_of_mixture = (
        is_moved and of_whole in ("higher", "lower") and all(state.decision != of_whole for state in found)
    )
    if not (is_of_mixture or differ([state.ratio for state in found if state.ratio], matters)):
        return ""
    return f"what changed hangs on the state of a step: {'; '.join(state.text for state in found)}"


def _of(ratio: LogRatio) -> tuple[Floats, Floats]:
    return ratio.value, ratio.error.width(ALPHA)


def differ(ratios: Sequence[LogRatio], matters: float) -> bool:
    """Whether any state changed by more than the first, which has most steps, beyond the noise of steps. What
    runs differ by they do in all of their steps."""
    if len(ratios) < 2:
        return False
    usual = ratios[0]
    for ratio in ratios[1:]:
        apart = abs(float(ratio.value - usual.value))
        error = ratio.within.plus(usual.within.variance())
        if apart > max(math.log1p(matters), float(error.width(ALPHA / (len(ratios) - 1)))):
            return True
    return False


def _labels(runs: Sequence[Run]) -> dict[int, NDArray[np.str_]]:
    """The state of each judged step, by the run's identity."""
    steps = [run.global_step[run.judged_steps] for run in runs]
    of_runs = list(zip(runs, steps, strict=True))
    slowest = [-column(run, _negative(run, CLOCK), at, "most") for run, at in of_runs]
    highest = max((float(one[np.isfinite(one)].max(initial=0)) for one in slowest), default=0.0)
    tokens = [column(run, run.metrics.get(WORK), at, "first") for run, at in of_runs]
    sizes = _sizes(np.concatenate(tokens))
    found = {}
    for (run, at), clock, size in zip(of_runs, slowest, tokens, strict=True):
        labels = np.full(len(at), "other steps", dtype=object)
        for least, most in itertools.pairwise([-math.inf, *sizes]):
            words = f"{most:,.0f} tokens" if len(sizes) <= FEW_SIZES else f"up to {most:,.0f} tokens"
            labels[(least < size) & (size <= most)] = words
        labels[clock < LOW_CLOCK * highest] = "a low clock"
        for kind, words in STATES.items():
            labels[in_state(kind)(run, at) > 0] = words
        found[id(run)] = labels
    return found


def _negative(judged: Run, metric: str) -> Floats | None:
    values = judged.metrics.get(metric)
    return None if values is None else -values


def _sizes(tokens: Floats) -> list[float]:
    """The largest step of each size; [] where all are alike, or not known."""
    sizes = np.unique(tokens) if np.isfinite(tokens).all() else tokens[:0]
    if len(sizes) > FEW_SIZES:
        sizes = np.unique(np.quantile(tokens, [1 / 3, 2 / 3, 1]))
    return [float(size) for size in sizes] if len(sizes) > 1 else []
