"""The candidate against the reference: what changed, whether it is real, and where it comes from."""

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import numpy as np

from aorta.account.judge.alike import MAIN, MetricPair, are_calibrated, estimates, matching_pair
from aorta.account.judge.decompose import decompose
from aorta.account.judge.judged import why_missing
from aorta.account.judge.leading import LED, accuracy, is_raw_part
from aorta.account.judge.sentences import comparison_notes, headline, scope_text
from aorta.account.judge.settings import setting_differences
from aorta.account.judge.work import PER_GPU, unequal_work, work_notes
from aorta.account.metrics import (
    Meaning,
    meaning,
    metric_key,
    of_operation,
    of_source,
    operations,
    without_source,
)
from aorta.account.model import Comparison, ConfidenceInterval, Dataset, MetricComparison, StepWork, Verdict
from aorta.timeline.statistics import (
    ALPHA,
    MIN_STEPS,
    Contrast,
    contrast,
    holm,
)

CALLED: tuple[Verdict, ...] = ("better", "worse", "different")
MAIN_SHARE = 0.5
"""Of the rate of false alarms, for the main question; the other metrics share the rest."""


def compare(reference: Dataset, candidate: Dataset) -> Comparison:
    """Every metric that either side has, with a verdict for those of MEANINGS that are judged. Where
    calibrated numbers lead on both sides, exposed_ms compares these and raw.exposed_ms the measured ones."""
    names = dict.fromkeys((*reference.statistics, *candidate.statistics))
    likes = {name: matching_pair(name, reference, candidate) for name in names}
    if are_calibrated(reference, candidate):
        likes |= {
            of_source("raw", name): MetricPair(name, name) for name in LED["calibrated"] if name in names
        }
    work = unequal_work(reference, candidate)
    main = MAIN if work is None else PER_GPU
    rows = _by_work(_measured(likes, reference, candidate), work)
    judged = _judged(rows)
    shares = _shares(judged, main)
    contrasts = [rows[name].contrast_of() for name in judged]
    weights = [shares[name] for name in judged]
    adjusted = dict(zip(judged, holm([one.p_value for one in contrasts], weights), strict=True))
    with_drift = dict(zip(judged, holm([one.p_with_drift for one in contrasts], weights), strict=True))
    metrics = {
        name: row.judged(adjusted.get(name), with_drift.get(name), shares.get(name, 1.0), len(judged))
        for name, row in rows.items()
    }
    parts = decompose(reference, candidate, work)
    step_contrast = rows[MAIN].contrast if MAIN in rows else None
    comparison = Comparison(
        reference=reference.label,
        candidate=candidate.label,
        headline=headline(reference, candidate, metrics, parts, work),
        numbers=metrics["comm_ms"].numbers if "comm_ms" in metrics else "",
        scope=scope_text(reference, candidate),
        differences=list(setting_differences(reference, candidate)),
        metrics=metrics,
        num_judged=len(judged),
        decomposition=parts,
        notes=[
            *work_notes(reference, candidate, work),
            *comparison_notes(reference, candidate, metrics, parts, step_contrast, len(judged), main),
        ],
        main=main,
        work=work,
    )
    return comparison


class MetricRow(NamedTuple):
    """A metric before the others are known."""

    name: str
    meaning: Meaning
    like: MetricPair
    numbers: Literal["", "raw", "calibrated"]
    reference: float | None
    candidate: float | None
    contrast: Contrast | None
    reason: str
    accuracy: float | None = None
    """Of calibrated numbers: a smaller difference is none that they can tell."""

    def contrast_of(self) -> Contrast:
        assert self.contrast is not None
        return self.contrast

    def judged(
        self, p_adjusted: float | None, p_with_drift: float | None, share: float, num_judged: int
    ) -> MetricComparison:
        verdict, reason = self._verdict(p_adjusted, num_judged)
        if verdict in CALLED and p_with_drift is not None and p_with_drift > ALPHA:
            verdict, reason = "cannot tell", "; ".join(filter(None, [self._drift_text(share), reason]))
        contrast = self.contrast
        has_drift = contrast is not None and contrast.drift is not None
        wider = contrast.intervals_with_drift() if contrast and has_drift else None
        ratio = None
        if self.reference and self.candidate is not None and self.like.comparable:
            ratio = self.candidate / self.reference
        difference = None
        if self.reference is not None and self.candidate is not None and self.like.comparable:
            difference = self.candidate - self.reference
        return MetricComparison(
            name=self.name,
            unit=self.meaning.unit,
            direction=self.meaning.better,
            reference=self.reference,
            candidate=self.candidate,
            reference_interval=ConfidenceInterval(*contrast.reference_interval) if contrast else None,
            candidate_interval=ConfidenceInterval(*contrast.candidate_interval) if contrast else None,
            ratio=ratio,
            interval=ConfidenceInterval(*contrast.ratio_interval)
            if contrast and contrast.ratio_interval
            else None,
            difference=difference,
            difference_interval=ConfidenceInterval(*contrast.difference_interval) if contrast else None,
            detectable=max(contrast.detectable(share), self.accuracy or 0.0) if contrast else None,
            p_value=contrast.p_value if contrast else None,
            p_adjusted=p_adjusted,
            verdict=verdict,
            reason=reason,
            reference_metric=self.like.reference,
            candidate_metric=self.like.candidate,
            numbers=self.numbers,
            interval_with_drift=ConfidenceInterval(*wider[1]) if wider and wider[1] else None,
            difference_interval_with_drift=ConfidenceInterval(*wider[0]) if wider else None,
            p_with_drift=p_with_drift if has_drift else None,
        )

    def _drift_text(self, share: float) -> str:
        """What would explain the difference, and what would tell."""
        contrast = self.contrast_of()
        num_steps = min(run.num_steps for run in contrast.slow)
        enough = contrast.steps_that_tell(share)
        or_steps = "" if enough is None else f", or about {enough} steps,"
        return (
            f"a drift too slow to show in {num_steps} steps could explain it: a second run on each"
            f" side{or_steps} would settle it"
        )

    def _verdict(self, p_adjusted: float | None, num_judged: int) -> tuple[Verdict, str]:
        if self.contrast is None:
            return "not judged", self.reason
        p_value = p_adjusted
        if p_value is None:
            if not self.exact:
                if metric_key(self.name).source == "raw":
                    return "not judged", "the calibrated numbers are judged; these are shown beside them"
                if self.name == PER_GPU:
                    return (
                        "not judged",
                        "both sides do the same work per step, so step time is judged",
                    )
                if metric_key(self.name).source == "calibrated":
                    return "not judged", f"judged as {without_source(self.name)}"
                return "not judged", "shown for reference, not a metric that is judged"
            p_value = self.contrast.p_value
        if p_value > ALPHA:
            alone = self.contrast.p_value <= ALPHA
            caveat = f"significant alone, but among {num_judged} metrics it may be chance" if alone else ""
            return "no difference seen", "; ".join(filter(None, [caveat, self.reason]))
        if self.accuracy is not None and abs(self.contrast.difference) < self.accuracy:
            return "no difference seen", "the difference is smaller than the calibration error"
        if self.meaning.better == "neither":
            return "different", self.reason
        lower = self.contrast.difference < 0
        return ("better" if lower == (self.meaning.better == "lower") else "worse"), self.reason

    @property
    def exact(self) -> bool:
        """The same in every step of both sides, as counts and bytes are: nothing here is left to chance."""
        return self.meaning.judged and self.contrast is not None and self.contrast.error == 0


def _measured(likes: dict[str, MetricPair], reference: Dataset, candidate: Dataset) -> dict[str, MetricRow]:
    """Rows by name; numbers that have two names are measured once."""
    rows: dict[str, MetricRow] = {}
    first: dict[MetricPair, MetricRow] = {}
    for name, like in likes.items():
        row = first.get(like)
        if row is None:
            row = first[like] = _measure(name, like, reference, candidate)
        numbers = _numbers(name, reference, candidate)
        rows[name] = row._replace(name=name, meaning=meaning(name), numbers=numbers)
    return rows


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


def _measure(name: str, like: MetricPair, reference: Dataset, candidate: Dataset) -> MetricRow:
    sides = ((reference, like.reference), (candidate, like.candidate))
    medians = []
    for side, metric in sides:
        statistic = side.statistics.get(metric)
        medians.append(None if statistic is None else statistic.median)
    row = MetricRow(name, meaning(name), like, "", medians[0], medians[1], None, like.reason)
    if not like.comparable:
        return row
    for (side, metric), median in zip(sides, medians, strict=True):
        if median is None:
            return row._replace(reason=f"{side.label}: {why_missing(side, metric)}")
    found_r, found_c = (estimates(side, metric) for side, metric in sides)
    if found_r is None:
        return row._replace(reason=_too_few(reference, like.reference))
    if found_c is None:
        return row._replace(reason=_too_few(candidate, like.candidate))
    is_calibrated = any(metric_key(name).source == "calibrated" for name in (like.reference, like.candidate))
    compared = contrast(found_r, found_c)
    if compared.withheld:
        return row._replace(reason=compared.withheld)
    return row._replace(
        contrast=compared,
        reason="; ".join([*filter(None, [like.reason]), *_named(compared.caveats, reference, candidate)]),
        accuracy=accuracy(without_source(like.reference), (reference, candidate)) if is_calibrated else None,
    )


def _named(caveats: Sequence[str], reference: Dataset, candidate: Dataset) -> Iterator[str]:
    """Caveats that begin with the label of the side that each is about."""
    for text in caveats:
        for side, labelled in (("reference: ", reference), ("candidate: ", candidate)):
            if text.startswith(side):
                text = f"{labelled.label}: {text.removeprefix(side)}"
                break
        yield text


def _numbers(name: str, reference: Dataset, candidate: Dataset) -> Literal["", "raw", "calibrated"]:
    """Which of the two a row shows, where its name does not say it."""
    if not are_calibrated(reference, candidate):
        return ""
    return "calibrated" if name in LED["calibrated"] else "raw" if is_raw_part(name) else ""


def _too_few(side: Dataset, metric: str) -> str:
    num = min(
        int(np.count_nonzero(~np.isnan(run.values(metric)).any(axis=0))) if metric in run.run.metrics else 0
        for run in side.runs
    )
    if num >= MIN_STEPS:
        return f"{side.label}: fewer than half of the steps have this number on every rank"
    condition = "" if metric == MAIN else " with this number"
    return f"{side.label}: {num} judged step{'s' * (num != 1)}{condition}, {MIN_STEPS} are needed"


def _judged(rows: dict[str, MetricRow]) -> list[str]:
    """Metrics in Holm's family. A transfer time takes the place of the rank's own duration."""
    with_transfer = {
        op for op in operations(rows, "transfer_ms") if rows[of_operation("transfer_ms", op)].contrast
    }
    return [
        name
        for name, row in rows.items()
        if row.meaning.judged
        and row.contrast is not None
        and not row.exact
        and not (metric_key(name).name == "duration_ms" and metric_key(name).operation in with_transfer)
    ]


def _shares(judged: list[str], main: str) -> dict[str, float]:
    """Shares of the rate of false alarms; they add up to 1."""
    secondary = [name for name in judged if name != main]
    if main not in judged or not secondary:
        return {name: 1 / len(judged) for name in judged}
    return {name: MAIN_SHARE if name == main else (1 - MAIN_SHARE) / len(secondary) for name in judged}
