"""Which steps of two sides are taken together, and what is known of them besides their times."""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from aorta.account.judge.alike import MAIN
from aorta.account.judge.cells import account_of
from aorta.account.judge.sentences import percent_interval
from aorta.account.load.rank.host import AFTER, PREFIX, READY
from aorta.account.metrics import WORK, meaning
from aorta.account.model import ConfidenceInterval, Dataset, MetricComparison, Run
from aorta.account.numbers import number, percent
from aorta.timeline.arrays import Flags, Floats, Ints
from aorta.timeline.noise import NORMAL_95, error_of_mean
from aorta.timeline.ratio import (
    HOST_SPREAD,
    RUN_SPREAD,
    Decision,
    LogRatio,
    Spread,
    decided,
    log_ratio,
    taken_columns,
    work_columns,
)
from aorta.timeline.statistics import ALPHA, MIN_STEPS

TAKEN = 0.01
"""Share of the steps in which others had the core, above which a comparison allows for it."""
ALLOWANCE_ERROR = 0.1
"""Part of itself by which the allowance for a core that others took may be off."""
MOVES_TOGETHER = 0.5
"""Correlation of the step times of two runs above which they show the same data or events."""
FEW_DIGITS = 1e-12
STATES = {
    "checkpoint": "a checkpoint was saved",
    "garbage_collection": "garbage was collected",
    "pause": "the program paused",
}
"""What may happen in some steps. A step in which it happens on one side alone is compared with none."""
LEAST_OF_STEP = 0.02
"""Share of the step that such a thing has to take."""


class Pairs(NamedTuple):
    """Series of one metric on both sides, step by step. Arrays are [run, step]."""

    reference: Floats
    candidate: Floats
    steps: Ints
    """[step]: global steps; the places in their run where runs have no steps in common."""
    is_by_step: bool
    is_log: bool
    """Logarithms; otherwise parts of `scale`, for what may be 0."""
    scale: float
    known: tuple[Floats, Floats] | None
    """What explains a step, [run, step, covariate]."""
    unlike: dict[str, int] = {}
    """Steps left out, by what happened in them on one side alone (STATES)."""
    allowed: float = 0.0
    """Of the cores that others took: what is allowed for in the logarithm of the step, both sides together as
    independent amounts."""

    on_host: bool = False
    """A CPU does the work."""

    def ratio(self, spread: Spread | None) -> LogRatio:
        r, c = self.known or (None, None)
        least = HOST_SPREAD if self.on_host else RUN_SPREAD
        found = log_ratio(self.reference, self.candidate, r, c, spread, least)
        if self.allowed and len(self.reference) == len(self.candidate) == 1:
            # Who takes cores takes caches and clocks too, of which no step tells; another one on each side.
            found = found._replace(error=found.error.plus((ALLOWANCE_ERROR * self.allowed) ** 2))
        return found


class _Series(NamedTuple):
    """One run's metric: the middle of its ranks where all have it."""

    steps: Ints
    values: Floats


def pairs(
    reference: Dataset,
    candidate: Dataset,
    metric: str,
    is_chosen: Callable[[Run], Flags] | None = None,
) -> Pairs | None:
    """None where fewer than MIN_STEPS can be taken together. is_chosen: which judged steps of a run are."""
    sides = [[_series(run, metric, is_chosen) for run in side.runs] for side in (reference, candidate)]
    common, is_by_step = _common([*sides[0], *sides[1]])
    if len(common) < MIN_STEPS:
        return None
    unlike: dict[str, int] = {}
    if is_by_step and meaning(metric).unit == "ms":
        common, unlike = _alike(reference, candidate, common)
    values = [np.stack([_at(run, common, is_by_step) for run in side]) for side in sides]
    is_log = all((side > 0).all() for side in values)
    scale = 1.0
    if is_log:
        values = [np.log(side) for side in values]
    else:
        scale = float(np.median(np.abs(values[0]))) or float(np.median(np.abs(values[1]))) or 1.0
        values = [side / scale for side in values]
    known = None
    allowed = 0.0
    if is_by_step and is_log and meaning(metric).unit == "ms":
        known = _known(reference, candidate, common)
        taken = [_of_runs(side, common, _taken) for side in (reference, candidate)]
        if _is_taken(taken):
            allowed = math.hypot(*(float(taken_columns(side).mean()) for side in taken))
    on_host = "host" in (reference.source, candidate.source)
    return Pairs(values[0], values[1], common, is_by_step, is_log, scale, known, unlike, allowed, on_host)


def _series(judged: Run, name: str, is_chosen: Callable[[Run], Flags] | None) -> _Series:
    steps = judged.global_step[judged.judged_steps]
    if name not in judged.metrics:
        return _Series(steps[:0], np.empty(0))
    values = judged.values(name)
    is_complete = np.isfinite(values).all(axis=0)
    if is_chosen is not None:
        is_complete &= is_chosen(judged)
    return _Series(steps[is_complete], np.median(values[:, is_complete], axis=0))


def _common(series: Sequence[_Series]) -> tuple[Ints, bool]:
    """Global steps that all have; where these are few, places in the order of what each measured."""
    steps = series[0].steps
    for one in series[1:]:
        steps = np.intersect1d(steps, one.steps)
    fewest = min(len(one.steps) for one in series)
    if 2 * len(steps) > fewest:
        return steps, True
    return np.arange(fewest), False


def _at(series: _Series, common: Ints, is_by_step: bool) -> Floats:
    places = np.searchsorted(series.steps, common) if is_by_step else common
    return series.values[places]


def _alike(reference: Dataset, candidate: Dataset, steps: Ints) -> tuple[Ints, dict[str, int]]:
    """The steps without those in which a checkpoint and the like fell on some of the runs alone, and how many
    went for each; all of them where fewer than half would be left."""
    left = np.ones(len(steps), dtype=bool)
    unlike: dict[str, int] = {}
    for kind in STATES:
        is_in = np.concatenate([_of_runs(side, steps, in_state(kind)) for side in (reference, candidate)]) > 0
        differs = is_in.any(axis=0) & ~is_in.all(axis=0)
        if differs.any():
            unlike[kind] = int(differs.sum())
            left &= ~differs
    if not unlike or left.sum() < max(MIN_STEPS, len(steps) / 2):
        return steps, {}
    return steps[left], unlike


def in_state(kind: str) -> Callable[[Run, Ints], Floats]:
    """1 in the steps of a run in which it took a part worth the name of any rank's step, else 0."""

    def read(judged: Run, steps: Ints) -> Floats:
        parts = [judged.host_parts.get(f"{PREFIX}{kind}{end}") for end in ("", AFTER)]
        noted = [np.nan_to_num(part) for part in parts if part is not None]
        if not noted:
            return np.zeros(len(steps))
        with np.errstate(divide="ignore", invalid="ignore"):
            share = np.nan_to_num(sum(noted) / judged.metrics["step_ms"])
        return (column(judged, share, steps, "most") > LEAST_OF_STEP).astype(float)

    return read


def state_text(reference: Dataset, candidate: Dataset, of_step: Pairs) -> str:
    """What was left out, and how much of all steps it took on each side: it may be what changed."""
    if not of_step.unlike:
        return ""
    texts = []
    for kind, num in of_step.unlike.items():
        shares = " and ".join(
            f"{side.label} {percent(_share(side, kind), digits=1)}" for side in (reference, candidate)
        )
        texts.append(f"{num} in which {STATES[kind]} ({shares} of all steps)")
    return (
        "like is compared with like: steps in which one side alone did something rare are left out:"
        f" {'; '.join(texts)}"
    )


def rare_text(reference: Dataset, candidate: Dataset, main: MetricComparison, matters: float) -> str:
    """Why two sides are not the same though their typical steps are, or may be: rare slow ones move the mean
    by more than matters, beyond its noise. '' where they do not."""
    if main.verdict not in ("same", "cannot tell") or main.interval is None:
        return ""
    means, variance = [], 0.0
    for side in (reference, candidate):
        steps = [np.nanmean(run.values("step_ms"), axis=0) for run in side.runs]
        if min(map(len, steps)) < MIN_STEPS:
            return ""
        levels = [float(np.nanmean(step)) for step in steps]
        means.append(float(np.mean(levels)))
        within = [
            float(error_of_mean(np.nan_to_num(step / level - 1)).variance())
            for step, level in zip(steps, levels, strict=True)
        ]
        variance += float(np.mean(within)) / len(steps)
    half = NORMAL_95 * math.sqrt(variance + 2 * RUN_SPREAD**2)
    change = math.log(means[1] / means[0])
    if abs(change) - half <= math.log1p(matters):
        return ""
    typical = f"typical steps are the same within {100 * matters:g} %, but " if main.verdict == "same" else ""
    return f"{typical}rare slow steps move the mean: {number(means[0])} and {number(means[1])} ms"


def _share(side: Dataset, kind: str) -> float:
    """Of the judged steps of a side, the middle of its runs."""
    shares = []
    for judged in side.runs:
        columns = judged.judged_steps
        parts = [judged.host_parts.get(f"{PREFIX}{kind}{end}") for end in ("", AFTER)]
        spent = sum(float(np.nansum(part[:, columns])) for part in parts if part is not None)
        shares.append(spent / float(np.nansum(judged.metrics["step_ms"][:, columns])))
    return float(np.median(shares))


def _known(reference: Dataset, candidate: Dataset, steps: Ints) -> tuple[Floats, Floats] | None:
    """Covariates of both sides that are not the same step by step."""
    columns: list[tuple[Floats, Floats]] = []
    tokens = _of_runs(reference, steps, _tokens), _of_runs(candidate, steps, _tokens)
    if (
        _is_known(tokens)
        and not _is_same(tokens)
        and abs(float(np.median(tokens[0]) / np.median(tokens[1])) - 1) < 0.1
    ):
        columns.append((work_columns(tokens[0]), work_columns(tokens[1])))
    taken = _of_runs(reference, steps, _taken), _of_runs(candidate, steps, _taken)
    if _is_taken(taken):
        columns.append((taken_columns(taken[0]), taken_columns(taken[1])))
    if not columns:
        return None
    sides = [np.concatenate([one[i] for one in columns], axis=-1) for i in (0, 1)]
    middle = np.concatenate(sides).mean(axis=(0, 1))
    return sides[0] - middle, sides[1] - middle


def _is_taken(shares: Sequence[Floats]) -> bool:
    return _is_known(shares) and max(float(side.mean()) for side in shares) > TAKEN


def _is_known(sides: Sequence[Floats]) -> bool:
    return all(bool(np.isfinite(side).all()) and side.size > 0 for side in sides)


def _is_same(sides: tuple[Floats, Floats]) -> bool:
    """Step by step, in every run of both sides."""
    runs = np.concatenate(sides)
    return bool((np.ptp(runs, axis=0) <= FEW_DIGITS * np.abs(runs[0])).all())


def _of_runs(side: Dataset, steps: Ints, read: Callable[[Run, Ints], Floats]) -> Floats:
    return np.stack([read(run, steps) for run in side.runs])


def _tokens(judged: Run, steps: Ints) -> Floats:
    return column(judged, judged.metrics.get(WORK), steps, "first")


def _taken(judged: Run, steps: Ints) -> Floats:
    """Of the rank that lost most: the others wait for it."""
    ready = judged.host_parts.get(READY)
    if ready is None:
        return np.full(len(steps), np.nan)
    with np.errstate(divide="ignore", invalid="ignore"):
        return column(judged, ready / judged.metrics["step_ms"], steps, "most")


def column(judged: Run, values: Floats | None, steps: Ints, of_ranks: Literal["first", "most"]) -> Floats:
    """[step]: of the first rank, or of the one that has most; NaN where nothing is known."""
    if values is None:
        return np.full(len(steps), np.nan)
    places = np.searchsorted(judged.global_step, steps)
    chosen = values[:, places]
    of_run: Floats = chosen[0] if of_ranks == "first" else chosen.max(axis=0)
    return of_run


def pairing_text(reference: Dataset, candidate: Dataset, of_step: Pairs) -> str:
    """What is taken with what, and what that rests on."""
    num = len(of_step.steps)
    if not of_step.is_by_step:
        return f"the runs have no steps in common: {num} steps of each are taken in their order"
    text = f"step k is taken with step k, {num} steps"
    tokens = _of_runs(reference, of_step.steps, _tokens), _of_runs(candidate, of_step.steps, _tokens)
    is_known = _is_known(tokens)
    if is_known and _is_same(tokens) and np.ptp(tokens[0]):
        text += ": both have the same number of tokens in each of them"
    elif is_known and not _is_same(tokens):
        text += "; their tokens differ, which is allowed for"
    else:
        together = float(np.median([
            _correlation(r, c) for r in of_step.reference for c in of_step.candidate
        ]))  # fmt: skip
        if together > MOVES_TOGETHER:
            text += f": their times rise and fall together (correlation {together:.2f})"
        elif is_known:
            text += ": all have as many tokens"
        else:
            text += ": by number alone, nothing shows whether their data are the same"
    if of_step.allowed:
        sides = " and ".join(map(_core_taken, (reference, candidate)))
        text += f"; others had the core for part of the step ({sides}), which is allowed for"
    return text


def _core_taken(side: Dataset) -> str:
    """'fsdp 22.0 %': the row "core taken" of its report, the mean of its runs."""
    share = float(np.mean([account_of(judged).share("core_taken") for judged in side.runs]))
    return f"{side.label} {percent(share, digits=1)}"


def _correlation(first: Floats, second: Floats) -> float:
    if not np.ptp(first) or not np.ptp(second):
        return 0.0
    return float(np.corrcoef(first, second)[0, 1])


# -- the step time in each state ------------------------------------------------------------------------
#
# A save that takes twice as long, or a kernel that is slow for long sequences alone, is little of the typical
# step. And where one side was in a state more often, that may be all that changed. States exclude each other:
# what the host did in a step (STATES), else a low clock, else how many tokens it had. Steps of a state are
# taken together where both sides were in it, else in the order of each run.

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
        change = percent(math.exp(self.ratio.value) - 1, sign=True, digits=1)
        change += percent_interval(ConfidenceInterval(low, high))
        words = WORDS[self.decision] if self.is_judged else "in these runs"
        return f"{self.name} ({steps} steps): {words}, {change}"


def states_text(
    reference: Dataset, candidate: Dataset, whole: Pairs, matters: float, spread: Spread | None
) -> str:
    """A sentence with the verdict in each state; '' where states do not differ."""
    if not whole.is_log:
        return ""
    sides = (reference, candidate)
    labels = _labels([run for side in sides for run in side.runs])
    total = sum(map(len, labels.values())) / len(labels)
    has_several = min(len(side.runs) for side in sides) > 1
    found = []
    for name in dict.fromkeys(np.concatenate(list(labels.values())).tolist()):

        def is_in(judged: Run, name: str = name) -> Flags:
            mask: Flags = labels[id(judged)] == name
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
