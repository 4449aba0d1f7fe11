"""The candidate against the reference: what changed, whether it is real, and where it comes from."""

import math
from typing import NamedTuple

import msgspec
import numpy as np

from aorta.account import numbers
from aorta.account.judge.alike import (
    MAIN,
    PER_GPU,
    programs,
    setting_differences,
    unequal_work,
    unlike_steps,
    why_unlike,
    work_notes,
)
from aorta.account.judge.decompose import Change, decompose
from aorta.account.judge.judged import why_missing
from aorta.account.judge.pairing import Pairs, pairing_text, pairs, rare_text, state_text, states_text
from aorta.account.judge.sentences import comparison_notes, headline, method_notes, scope_text
from aorta.account.judge.timed_steps import values_where_timed
from aorta.account.metrics import (
    WORK,
    Meaning,
    meaning,
    metric_key,
    of_operation,
    operations,
)
from aorta.account.model import Comparison, ConfidenceInterval, Dataset, MetricComparison, StepWork, Verdict
from aorta.timeline.ratio import MOST_RUNS, LogRatio, Spread, runs_needed
from aorta.timeline.statistics import ALPHA, MIN_STEPS, holm

CALLED: tuple[Verdict, ...] = ("better", "worse", "different")
MATTERS = 0.03
"""The smallest change that matters, where nobody says another (--matters)."""
NO_DIFFERENCE = 1e-9
WIDEST = 100.0
"""Ratio of an interval's ends above which it tells nothing, and is not printed."""


def compare(
    reference: Dataset, candidate: Dataset, matters: float = MATTERS, spread: Spread | None = None
) -> Comparison:
    """Every metric that either side has, with a verdict for those of MEANINGS that are judged.

    matters: the smallest change that matters, as a part. spread: of runs of this program, where it is known.
    """
    names = dict.fromkeys((*reference.statistics, *candidate.statistics))
    work = unequal_work(reference, candidate)
    main = MAIN if work is None else PER_GPU
    rows = _by_work({name: _measure(name, reference, candidate, spread) for name in names}, work)
    judged = _judged(rows)
    others = [name for name in judged if name != main]
    adjusted = dict(zip(others, holm([rows[name].p_value() for name in others]), strict=True))
    if main in judged:
        adjusted[main] = rows[main].p_value()
    metrics = {
        name: row.judged(adjusted.get(name), len(others), matters, is_main=name == main)
        for name, row in rows.items()
    }
    of_main = rows.get(main)
    of_pairs = None if of_main is None else of_main.pairs
    states, pairings = "", list[str]()
    if of_pairs is not None:
        pairings = [told(reference, candidate, of_pairs) for told in (pairing_text, state_text)]
        states = states_text(reference, candidate, of_pairs, matters, spread) if main == MAIN else ""
    assumed = None
    if spread is None and len(reference.runs) == len(candidate.runs) == 1 and of_main and of_main.ratio:
        assumed = float(of_main.ratio.spread)
    change = None if of_main is None else _change(of_main, rows.get(MAIN), work)
    parts = None if change is None else decompose(reference, candidate, work, change)
    if main in metrics and work is None and (rare := rare_text(reference, candidate, metrics[main], matters)):
        metrics[main] = msgspec.structs.replace(metrics[main], verdict="cannot tell", reason=rare)
    return Comparison(
        reference=reference.label,
        candidate=candidate.label,
        headline=headline(reference, candidate, metrics, parts, work, matters)
        + _of_others(reference, candidate),
        scope=scope_text(reference, candidate, of_main.ratio if of_main else None, spread),
        differences=list(setting_differences(reference, candidate)),
        metrics=metrics,
        num_judged=len(judged),
        decomposition=parts,
        notes=[
            *_program_notes(reference, candidate),
            *work_notes(reference, candidate, work),
            *filter(None, [states]),
            *comparison_notes(reference, candidate, metrics, parts, main),
            *filter(None, pairings),
            *method_notes(reference, candidate, metrics, len(judged), main, assumed),
        ],
        main=main,
        work=work,
        matters=matters,
        is_described=all(run.record is not None for side in (reference, candidate) for run in side.runs),
    )


def _of_others(reference: Dataset, candidate: Dataset) -> str:
    """What the answer must not be read without: two programs, or steps of unlike work."""
    names = programs(reference, candidate)
    of_programs = "" if names is None else f" (two programs: {names[0]} and {names[1]})"
    unlike = unlike_steps(reference, candidate)
    return of_programs + (f" ({unlike})" if unlike else "")


def _program_notes(reference: Dataset, candidate: Dataset) -> list[str]:
    """That two programs are compared, and whether their steps hold as much."""
    names = programs(reference, candidate)
    if names is None:
        return []
    sides = (reference, candidate)
    unknown = [
        side.label
        for side in sides
        if side.statistics.get(WORK) is None or side.statistics[WORK].median is None
    ]
    text = (
        f"two programs are compared, {names[0]} and {names[1]}: what differs between them is not one change"
    )
    if unknown:
        text += f"; the work of a step is not known ({' and '.join(unknown)} recorded no tokens)"
    return [text]


class MetricRow(NamedTuple):
    """A metric before the others are known."""

    name: str
    meaning: Meaning
    reference: float | None
    candidate: float | None
    pairs: Pairs | None
    ratio: LogRatio | None
    """Of pairs: the logarithm of the ratio, or the difference over the reference for what may be 0."""
    reason: str
    comparable: bool = True

    @property
    def value(self) -> float:
        assert self.ratio is not None
        return float(self.ratio.value)

    def p_value(self) -> float:
        assert self.ratio is not None
        if self.exact:
            return float(abs(self.value) <= NO_DIFFERENCE)
        return float(self.ratio.error.p_value(self.ratio.value))

    def ends(self) -> tuple[float, float]:
        """Of the 95 % interval, on the scale of value."""
        assert self.ratio is not None
        half = 0.0 if self.exact else float(self.ratio.error.width(ALPHA))
        return self.value - half, self.value + half

    def judged(
        self, p_adjusted: float | None, num_others: int, matters: float, is_main: bool
    ) -> MetricComparison:
        verdict, reason = self._verdict(p_adjusted, num_others, matters, is_main)
        ratio = interval = difference = around = None
        if self.reference is not None and self.candidate is not None and self.comparable:
            difference = self.candidate - self.reference
            ratio = self.candidate / self.reference if self.reference else None
        if self.pairs is not None and self.ratio is not None and self.reference is not None:
            low, high = self.ends()
            if self.pairs.is_log:
                ratio = ratio if self.exact else math.exp(self.value)
                if high - low < math.log(WIDEST):
                    interval = ConfidenceInterval(math.exp(low), math.exp(high))
                    around = ConfidenceInterval(
                        self.reference * math.expm1(low), self.reference * math.expm1(high)
                    )
            else:
                around = ConfidenceInterval(self.pairs.scale * low, self.pairs.scale * high)
        return MetricComparison(
            name=self.name,
            unit=self.meaning.unit,
            direction=self.meaning.better,
            reference=self.reference,
            candidate=self.candidate,
            ratio=ratio,
            interval=interval,
            difference=difference,
            difference_interval=around,
            p_value=None if self.ratio is None else self.p_value(),
            p_adjusted=p_adjusted,
            verdict=verdict,
            reason=reason,
        )

    def _verdict(
        self, p_adjusted: float | None, num_others: int, matters: float, is_main: bool
    ) -> tuple[Verdict, str]:
        if self.ratio is None or self.pairs is None:
            return "not judged", self.reason
        if p_adjusted is None and not self.exact:
            if self.name == PER_GPU:
                return "not judged", "both sides do the same work per step, so step time is judged"
            return "not judged", "shown for reference, not a metric that is judged"
        low, high = self.ends()
        margin = math.log1p(matters) if self.pairs.is_log else matters
        counts = self.exact and self.meaning.unit != "ms"
        if max(abs(low), abs(high)) <= (NO_DIFFERENCE if counts else margin):
            return "same", self.reason
        p_value = self.p_value() if p_adjusted is None else p_adjusted
        if p_value > ALPHA:
            caveat = ""
            if self.p_value() <= ALPHA:
                caveat = f"significant alone, but among {num_others} parts of the step it may be chance"
            needs = self._needs(matters) if is_main else ""
            return "cannot tell", "; ".join(filter(None, [needs, caveat, self.reason]))
        if self.meaning.better == "neither":
            return "different", self.reason
        return ("better" if (self.value < 0) == (self.meaning.better == "lower") else "worse"), self.reason

    def _needs(self, matters: float) -> str:
        """What would tell a difference that matters."""
        assert self.ratio is not None
        num = runs_needed(self.ratio, matters, ALPHA)
        change = numbers.percent(matters, digits=0 if matters >= 0.01 else 1)
        if num is None:
            return f"runs here differ by too much for {change}: more than {MOST_RUNS} a side would be needed"
        needs = f"to find {change} in four of five cases would need {num} runs a side"
        return f"{needs}: `aorta ab` does them in turn"

    @property
    def exact(self) -> bool:
        """The same in every step of both sides, as counts and bytes are: nothing here is left to chance."""
        return self.ratio is not None and not bool((self.ratio.error.variances > 0).any())


def _change(main: MetricRow, step: MetricRow | None, work: StepWork | None) -> Change | None:
    """Of the typical step, for the same work: by the ratio that is judged; by the medians where none is."""
    if step is None or not step.reference or not step.candidate:
        return None
    if main.ratio is None or main.pairs is None or not main.pairs.is_log:
        of_work = 1.0 if work is None else work.ratio
        return Change(step.reference, math.log(step.candidate / step.reference / of_work), None)
    sign = 1 if main.name == MAIN else -1  # work per time
    variance = 0.0 if main.exact else float(main.ratio.error.variance())
    return Change(step.reference, sign * main.value, variance, bool(main.pairs.allowed))


def _by_work(rows: dict[str, MetricRow], work: StepWork | None) -> dict[str, MetricRow]:
    """Rows with verdicts allowed for the work: with unlike work no step time is better, with like work no
    rate."""
    changed = dict(rows)
    for name, row in rows.items():
        if work is not None and row.meaning.judged and row.meaning.unit == "ms":
            changed[name] = row._replace(meaning=row.meaning._replace(better="neither"))
        elif work is None and name == PER_GPU:
            changed[name] = row._replace(meaning=row.meaning._replace(judged=False))
    return changed


def _measure(name: str, reference: Dataset, candidate: Dataset, spread: Spread | None) -> MetricRow:
    sides = (reference, candidate)
    medians = []
    for side in sides:
        statistic = side.statistics.get(name)
        medians.append(None if statistic is None else statistic.median)
    unlike = why_unlike(name, reference, candidate)
    row = MetricRow(name, meaning(name), medians[0], medians[1], None, None, unlike, not unlike)
    if unlike:
        return row
    for side, median in zip(sides, medians, strict=True):
        if median is None:
            return row._replace(reason=f"{side.label}: {why_missing(side, name)}")
    for side in sides:
        if reason := _too_few(side, name):
            return row._replace(reason=reason)
    taken = pairs(reference, candidate, name)
    if taken is None:
        return row._replace(reason=f"fewer than {MIN_STEPS} steps of both sides can be taken together")
    return row._replace(pairs=taken, ratio=taken.ratio(spread))


def _too_few(side: Dataset, metric: str) -> str:
    """Why the steps of a side do not do; '' where they do."""
    for judged in side.runs:
        if metric not in judged.metrics:
            return f"{side.label}: {why_missing(side, metric)}"
        values = values_where_timed(judged, metric)
        num = int(np.count_nonzero(np.isfinite(values).all(axis=0)))
        if num < MIN_STEPS:
            condition = "" if metric == MAIN else " with this number"
            return f"{side.label}: {num} judged step{'s' * (num != 1)}{condition}, {MIN_STEPS} are needed"
        if 2 * num < values.shape[1]:
            return f"{side.label}: fewer than half of the steps have this number on every rank"
    return ""


def _judged(rows: dict[str, MetricRow]) -> list[str]:
    """Metrics in Holm's family. A transfer time takes the place of the rank's own duration."""
    with_transfer = {
        op for op in operations(rows, "transfer_ms") if rows[of_operation("transfer_ms", op)].ratio
    }
    return [
        name
        for name, row in rows.items()
        if row.meaning.judged
        and row.ratio is not None
        and not row.exact
        and not (metric_key(name).name == "duration_ms" and metric_key(name).operation in with_transfer)
    ]
