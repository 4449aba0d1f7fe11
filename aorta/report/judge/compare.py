"""The candidate against the reference: what changed, whether it is real, and where it comes from."""

import json
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from aorta.records.schema import RunRecord
from aorta.report import numbers
from aorta.report.judge.leading import (
    AGAINST_KERNELS,
    LED,
    OF_COMPUTE,
    accuracy,
    few_calibrated,
    has_any,
    is_of_kernels,
    is_raw_part,
    leading,
    num_calibrated,
    num_timed,
    own_lead,
    partly_timed,
    plain,
    with_word,
)
from aorta.report.judge.summary import bandwidths, timed_steps, values_where_timed, why_missing
from aorta.report.judge.work import PER_GPU, rate_text, unequal_work, work_notes, work_text
from aorta.report.model import (
    Comparison,
    Dataset,
    Decomposition,
    Direction,
    Interval,
    JudgedRun,
    MetricComparison,
    Part,
    Setting,
    Verdict,
    Work,
)
from aorta.report.numbers import number
from aorta.timeline.statistics import (
    ALPHA,
    MIN_STEPS,
    UNLIKE_LENGTHS,
    Contrast,
    Estimate,
    contrast,
    estimate,
    holm,
)
from aorta.timeline.types import KERNEL_SOURCES


class Meaning(NamedTuple):
    """What a metric is to a comparison."""

    better: Direction
    unit: str
    judged: bool = False
    """Gets a verdict, and is allowed for by Holm's method."""


MEANINGS = {
    "step_ms": Meaning("lower", "ms", judged=True),
    "compute_ms": Meaning("lower", "ms", judged=True),
    "comm_ms": Meaning("lower", "ms", judged=True),
    "exposed_ms": Meaning("lower", "ms", judged=True),
    "hidden_ms": Meaning("neither", "ms", judged=True),
    "idle_ms": Meaning("lower", "ms", judged=True),
    "overlap_ratio": Meaning("higher", "", judged=True),
    "transfer_ms": Meaning("lower", "ms", judged=True),
    "duration_ms": Meaning("lower", "ms", judged=True),
    "busbw_gb_s": Meaning("higher", "GB/s", judged=True),
    "count": Meaning("neither", "", judged=True),
    "bytes": Meaning("neither", "bytes", judged=True),
    "wait_ms": Meaning("lower", "ms"),
    "between_steps_ms": Meaning("lower", "ms"),
    "host_ms": Meaning("lower", "ms"),
    "exposed_copy_ms": Meaning("lower", "ms"),
    "exposed_wait_ms": Meaning("lower", "ms"),
    "exposed_transfer_ms": Meaning("lower", "ms"),
    "hidden_per_compute": Meaning("neither", ""),
    "compute_per_step": Meaning("neither", ""),
    "comm_per_step": Meaning("neither", ""),
    "exposed_per_step": Meaning("lower", ""),
    "idle_per_step": Meaning("lower", ""),
    "compute_allreduce_ms": Meaning("neither", "ms"),
    "compute_reducescatter_ms": Meaning("neither", "ms"),
    "stalled_ms": Meaning("lower", "ms"),
    "kernel_ms": Meaning("lower", "ms", judged=True),
    "kernel_count": Meaning("neither", "launches"),
    "starved_bound_ms": Meaning("lower", "ms"),
    "starved_hidden_bound_ms": Meaning("lower", "ms"),
    "tokens_per_s_per_gpu": Meaning("higher", "tokens/s", judged=True),
    "tokens_per_s": Meaning("higher", "tokens/s"),
    "model_tflops_per_gpu": Meaning("higher", "TFLOP/s"),
    "mfu": Meaning("higher", ""),
    "energy_per_token_mj": Meaning("lower", "mJ"),
    "peak_memory_bytes": Meaning("lower", "bytes"),
    "reserved_memory_bytes": Meaning("lower", "bytes"),
    "device_memory_bytes": Meaning("lower", "bytes"),
    "alloc_retries": Meaning("lower", ""),
    "power_w": Meaning("neither", "W"),
    "sm_clock_mhz": Meaning("higher", "MHz"),
    "memory_clock_mhz": Meaning("higher", "MHz"),
    "temperature_c": Meaning("lower", "°C"),
    "utilization_percent": Meaning("higher", "percent"),
    "throttled": Meaning("lower", ""),
    "tokens_per_step": Meaning("neither", "tokens"),
}
"""By the name before a dot: transfer_ms stands for transfer_ms.all_gather too. comm_ms.<op> and
exposed_ms.<op> are shown without a verdict of their own, and so is tokens_per_s_per_gpu where a step holds
the same work on both sides: that is the step time once more."""

EXACT_FREEDOM = 1e9
MAIN = "step_ms"
MAIN_SHARE = 0.5
"""Of the rate of false alarms, for the main question; the other metrics share the rest."""
SPARE_SETTINGS = frozenset(("training.output_dir", "training.resume"))
"""Settings of where, not of what."""


def meaning(name: str) -> Meaning:
    """Of a metric, whatever operation it is of."""
    if plain(name) != name:
        return meaning(plain(name))._replace(judged=False)
    kind, dot, _ = name.partition(".")
    found = MEANINGS.get(kind, Meaning("neither", "ms" if kind.endswith("_ms") else ""))
    if dot and kind in ("comm_ms", "exposed_ms"):
        return found._replace(judged=False)
    return found


def compare(reference: Dataset, candidate: Dataset) -> Comparison:
    """Every metric that either side has, with a verdict for those of MEANINGS that are judged. Where
    calibrated numbers lead on both sides, exposed_ms compares these and raw.exposed_ms the measured ones."""
    names = dict.fromkeys((*reference.statistics, *candidate.statistics))
    likes = {name: _like(name, reference, candidate) for name in names}
    if _are_calibrated(reference, candidate):
        likes |= {f"raw.{name}": _Like(name, name) for name in LED["calibrated"] if name in names}
    work = unequal_work(reference, candidate)
    main = MAIN if work is None else PER_GPU
    rows = _by_work(_measured(likes, reference, candidate), work)
    judged = _judged(rows)
    shares = _shares(judged, main)
    adjusted = dict(
        zip(
            judged,
            holm([rows[name].contrast_of().p_value for name in judged], [shares[n] for n in judged]),
            strict=True,
        )
    )
    metrics = {
        name: row.judged(adjusted.get(name), shares.get(name, 1.0), len(judged)) for name, row in rows.items()
    }
    parts = _decompose(reference, candidate, work)
    comparison = Comparison(
        reference=reference.label,
        candidate=candidate.label,
        headline=_headline(reference, candidate, metrics, parts, work),
        numbers=metrics["comm_ms"].numbers if "comm_ms" in metrics else "",
        scope=_scope(reference, candidate),
        differences=list(_differences(reference, candidate)),
        metrics=metrics,
        num_judged=len(judged),
        decomposition=parts,
        notes=[
            *work_notes(reference, candidate, work),
            *_notes(reference, candidate, metrics, parts, rows, len(judged), main),
        ],
        main=main,
        work=work,
    )
    return comparison


def estimates(dataset: Dataset, name: str) -> list[Estimate] | None:
    """One for each run; None where one of them has too few steps of it. A projection is exact."""
    found = []
    for judged in dataset.runs:
        one = None
        value = judged.statistics[name].median if name in judged.statistics else None
        if dataset.source == "projected" and value is not None:
            one = Estimate(value, 0.0, EXACT_FREEDOM, judged.num_steps, judged.num_steps, 1)
        elif name in judged.run.metrics:
            one = estimate(values_where_timed(judged, name), positions=_positions(judged, name))
        if one is None:
            return None
        found.append(one)
    return found


def _positions(judged: JudgedRun, name: str) -> NDArray[np.int64]:
    """Of the steps of values_where_timed, within the run."""
    has_any = timed_steps(judged) | np.isfinite(judged.values(name)).any(axis=0)
    return np.flatnonzero(has_any).astype(np.int64) + judged.num_warmup


# ---- one metric --------------------------------------------------------------------------------


class _Like(NamedTuple):
    """Which metrics of the two sides mean the same."""

    reference: str
    candidate: str
    reason: str = ""
    """Why none do; or what was taken."""
    comparable: bool = True


def _like(name: str, reference: Dataset, candidate: Dataset) -> _Like:
    windows = [side.label for side in (reference, candidate) if is_window(side)]
    if len(windows) == 1 and (meaning(name).unit in ("ms", "bytes") or name.startswith("count.")):
        return _Like(name, name, f"{windows[0]} marks no steps: its numbers are of all that was read", False)
    if unlike := _unlike_bandwidths(name, reference, candidate):
        return _Like(name, name, unlike, False)
    taken = leading(reference, name), leading(candidate, name)
    if taken != (name, name):
        against_kernels = reference.lead != candidate.lead
        return _Like(*taken, AGAINST_KERNELS if against_kernels else "")
    if _kind_of_source(reference) == _kind_of_source(candidate) or name not in OF_COMPUTE:
        return _Like(name, name)
    sources = f"{reference.source} and {candidate.source}"
    why = _why_unlike((reference, candidate))
    return _Like(name, name, f"{sources} mean different things by compute, and {why}", False)


def _unlike_bandwidths(name: str, reference: Dataset, candidate: Dataset) -> str:
    """Why bandwidths differ for another reason than speed; '' where they do not, or one is not known."""
    found = [bandwidths(side.runs, name) for side in (reference, candidate)]
    if [len(one) for one in found] != [1, 1] or found[0] == found[1]:
        return ""
    labels = (reference.label, candidate.label)
    matched, other = labels if "transfer" in found[0] else labels[::-1]
    return (
        f"not the same thing on both sides: that of {matched} is over the transfer, that of {other} over the"
        " whole duration, waiting for late ranks included"
    )


def _why_unlike(sides: Sequence[Dataset]) -> str:
    """Why calibrated numbers do not help to compare two kinds of sources."""
    for side, other in (sides, sides[::-1]):
        if own_lead(side) == "calibrated":
            return f"{other.label} does not tell the kernels of its compute stream apart"
        if has_any(side):
            return f"of {side.label} {few_calibrated(side)}"
    return "neither is calibrated"


def _are_calibrated(reference: Dataset, candidate: Dataset) -> bool:
    return reference.lead == candidate.lead == "calibrated"


def is_window(side: Dataset) -> bool:
    """A trace without step markers: all that was read is one step."""
    run = side.first.run
    if run.source not in KERNEL_SOURCES or run.num_steps > 1:
        return False
    spans_ms = [run.totals[rank]["span_ms"] for rank in run.ranks]
    return bool(np.allclose(run.metrics["step_ms"][:, 0], np.array(spans_ms, dtype=float), rtol=1e-6))


def _kind_of_source(side: Dataset) -> str:
    return "kernels" if is_of_kernels(side) else side.source


def _has(side: Dataset, name: str) -> bool:
    found = side.statistics.get(name)
    return found is not None and found.median is not None


class _Row(NamedTuple):
    """A metric before the others are known."""

    name: str
    meaning: Meaning
    like: _Like
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

    def judged(self, p_adjusted: float | None, share: float, num_judged: int) -> MetricComparison:
        verdict, reason = self._verdict(p_adjusted, num_judged)
        found = self.contrast
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
            reference_interval=Interval(*found.reference_interval) if found else None,
            candidate_interval=Interval(*found.candidate_interval) if found else None,
            ratio=ratio,
            interval=Interval(*found.ratio_interval) if found and found.ratio_interval else None,
            difference=difference,
            difference_interval=Interval(*found.difference_interval) if found else None,
            detectable=max(found.detectable(share), self.accuracy or 0.0) if found else None,
            p_value=found.p_value if found else None,
            p_adjusted=p_adjusted,
            verdict=verdict,
            reason=reason,
            reference_metric=self.like.reference,
            candidate_metric=self.like.candidate,
            numbers=self.numbers,
        )

    def _verdict(self, p_adjusted: float | None, num_judged: int) -> tuple[Verdict, str]:
        if self.contrast is None:
            return "not judged", self.reason
        p_value = p_adjusted
        if p_value is None:
            if not self.exact:
                if self.name.startswith("raw."):
                    return "not judged", "the calibrated numbers are judged; these are shown beside them"
                if self.name == PER_GPU:
                    return "not judged", "a step holds the same work on both sides: its time is judged"
                if self.name.startswith("calibrated."):
                    return "not judged", f"what is judged is given as {plain(self.name)}"
                return "not judged", "shown for its size, not one of the metrics that are judged"
            p_value = self.contrast.p_value
        if p_value > ALPHA:
            alone = self.contrast.p_value <= ALPHA
            why = f"alone it would be called, among {num_judged} metrics it may be chance" if alone else ""
            return "no difference seen", "; ".join(filter(None, [why, self.reason]))
        if self.accuracy is not None and abs(self.contrast.difference) < self.accuracy:
            return "no difference seen", "the numbers differ by less than calibration is good for"
        if self.meaning.better == "neither":
            return "different", self.reason
        lower = self.contrast.difference < 0
        return ("better" if lower == (self.meaning.better == "lower") else "worse"), self.reason

    @property
    def exact(self) -> bool:
        """The same in every step of both sides, as counts and bytes are: nothing here is left to chance."""
        return self.meaning.judged and self.contrast is not None and self.contrast.error == 0


def _measured(likes: dict[str, _Like], reference: Dataset, candidate: Dataset) -> dict[str, _Row]:
    """By name; numbers that have two names are measured once."""
    rows: dict[str, _Row] = {}
    first: dict[_Like, _Row] = {}
    for name, like in likes.items():
        row = first.get(like)
        if row is None:
            row = first[like] = _measure(name, like, reference, candidate)
        numbers = _numbers(name, reference, candidate)
        rows[name] = row._replace(name=name, meaning=meaning(name), numbers=numbers)
    return rows


def _by_work(rows: dict[str, _Row], work: Work | None) -> dict[str, _Row]:
    """Of unlike work no time of a step is better or worse; of the same work the rate is that time again."""
    found = dict(rows)
    for name, row in rows.items():
        if work is not None and row.meaning.judged and row.meaning.unit == "ms":
            found[name] = row._replace(meaning=row.meaning._replace(better="neither"))
        elif work is None and name == PER_GPU:
            found[name] = row._replace(meaning=row.meaning._replace(judged=False))
    return found


def _measure(name: str, like: _Like, reference: Dataset, candidate: Dataset) -> _Row:
    sides = ((reference, like.reference), (candidate, like.candidate))
    medians = []
    for side, metric in sides:
        found = side.statistics.get(metric)
        medians.append(None if found is None else found.median)
    row = _Row(name, meaning(name), like, "", medians[0], medians[1], None, like.reason)
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
    is_calibrated = any(metric.startswith("calibrated.") for metric in (like.reference, like.candidate))
    compared = contrast(found_r, found_c)
    if compared.withheld:
        return row._replace(reason=compared.withheld)
    return row._replace(
        contrast=compared,
        reason="; ".join([*filter(None, [like.reason]), *_named(compared.caveats, reference, candidate)]),
        accuracy=accuracy(plain(like.reference), (reference, candidate)) if is_calibrated else None,
    )


def _named(caveats: Sequence[str], reference: Dataset, candidate: Dataset) -> Iterator[str]:
    """With the label of the side that each is about."""
    for text in caveats:
        for side, one in (("reference: ", reference), ("candidate: ", candidate)):
            if text.startswith(side):
                text = f"{one.label}: {text.removeprefix(side)}"
                break
        yield text


def _numbers(name: str, reference: Dataset, candidate: Dataset) -> Literal["", "raw", "calibrated"]:
    """Which of the two a row shows, where its name does not say it."""
    if not _are_calibrated(reference, candidate):
        return ""
    return "calibrated" if name in LED["calibrated"] else "raw" if is_raw_part(name) else ""


def _too_few(side: Dataset, metric: str) -> str:
    num = min(
        int(np.count_nonzero(~np.isnan(run.values(metric)).any(axis=0))) if metric in run.run.metrics else 0
        for run in side.runs
    )
    if num >= MIN_STEPS:
        return f"{side.label}: fewer than half of the steps have it on every rank"
    known = "" if metric == MAIN else " with it"
    return f"{side.label}: {num} judged step{'s' * (num != 1)}{known}, {MIN_STEPS} are needed"


def _judged(rows: dict[str, _Row]) -> list[str]:
    """Metrics in Holm's family. A transfer time takes the place of the rank's own duration."""
    with_transfer = {
        name.partition(".")[2]
        for name, row in rows.items()
        if name.startswith("transfer_ms.") and row.contrast
    }
    return [
        name
        for name, row in rows.items()
        if row.meaning.judged
        and row.contrast is not None
        and not row.exact
        and not (name.startswith("duration_ms.") and name.partition(".")[2] in with_transfer)
    ]


def _shares(judged: list[str], main: str) -> dict[str, float]:
    """Of the rate of false alarms; they add up to 1."""
    others = [name for name in judged if name != main]
    if main not in judged or not others:
        return {name: 1 / len(judged) for name in judged}
    return {name: MAIN_SHARE if name == main else (1 - MAIN_SHARE) / len(others) for name in judged}


# ---- the step time taken apart -------------------------------------------------------------------

ESTIMATOR = (
    "means over ranks, then over the judged steps that all ranks recorded in full, then over runs;"
    " means add up where medians do not, and feel rare slow steps"
)


PARTS = ("compute_ms", "exposed_ms", "exposed_wait_ms", "exposed_copy_ms", "idle_ms")
OF_RAW = ("exposed_wait_ms", "exposed_copy_ms")
"""Parts of what was measured, which need not fit calibrated numbers."""


def _decompose(reference: Dataset, candidate: Dataset, work: Work | None) -> Decomposition | None:
    """None where the step times or all parts are not known, or do not mean the same on both sides. Where the
    work of a step differs, the candidate's times are those of the reference's tokens."""
    sides = (reference, candidate)
    likes = {name: _like(name, reference, candidate) for name in ("step_ms", *PARTS)}
    if not all(like.comparable for like in likes.values()):
        return None
    if not all(_has(side, "step_ms") for side in sides):
        return None
    taken = [{name: like.reference for name, like in likes.items()}]
    taken += [{name: like.candidate for name, like in likes.items()}]
    is_raw = all(side.lead == "raw" for side in sides)
    known = [name for name in PARTS if all(_has(sides[i], taken[i][name]) for i in (0, 1))]
    known = [name for name in known if is_raw or name not in OF_RAW]
    rare = [name for name in known if any(_is_rare(sides[i], taken[i][name]) for i in (0, 1))]
    known = [name for name in known if name not in rare]
    if "compute_ms" not in known:
        return None
    series = [
        [_series(judged, {name: taken[i][name] for name in known}) for judged in side.runs]
        for i, side in enumerate(sides)
    ]
    if any(one is None for side in series for one in side):
        return None
    runs = [[one for one in side if one is not None] for side in series]
    if work is not None:
        runs[1] = [{name: values / work.ratio for name, values in one.items()} for one in runs[1]]
    names = list(runs[0][0])
    parts = [_part(name, runs) for name in names]
    step = next(part for part in parts if part.name == "step")
    notes = [like.reason for like in [likes["compute_ms"]] if like.reason]
    if "exposed" in names:
        why = "most steps were recorded without details" if rare else "ranks were not matched on both sides"
        why = why if is_raw else "waiting is known of raw numbers only"
        notes.append(f"exposed is not split into waiting and transfer: {why}")
    if not is_raw:
        notes += _of_calibrated(sides, parts)
    return Decomposition(
        step=step,
        parts=[part for part in parts if part.name != "step" and (part.reference_ms or part.candidate_ms)],
        estimator=f"calibrated {ESTIMATOR}" if _are_calibrated(reference, candidate) else ESTIMATOR,
        notes=notes,
        of_work=""
        if work is None
        else f"{candidate.label} for the tokens of a step of {reference.label}: times / {work.ratio:.3g}",
    )


def _of_calibrated(sides: Sequence[Dataset], parts: list[Part]) -> Iterator[str]:
    """What to know of parts that are estimates, and not known in every step."""
    for side in sides:
        lacking = sum(num_timed(run) - num_calibrated(run) for run in side.runs)
        if side.lead != "calibrated" or not lacking:
            continue
        is_timed = [timed_steps(run) for run in side.runs]
        pairs = list(zip(side.runs, is_timed, strict=True))
        step_ms = np.concatenate([run.values(MAIN)[:, timed].mean(axis=0) for run, timed in pairs])
        known = [np.isfinite(run.values("calibrated.comm_ms")[:, timed]).all(axis=0) for run, timed in pairs]
        only = " that were timed and" if not np.concatenate(is_timed).all() else " that"
        is_known = np.concatenate(known)
        yield (
            f"{side.label}: without the {lacking} of {len(is_known)} judged steps{only} have no calibrated"
            " numbers on every rank; the mean of those is"
            f" {number(float(step_ms[~is_known].mean()))} ms, of the others"
            f" {number(float(step_ms[is_known].mean()))} ms"
        )
    if any(part.name == "idle" and min(part.reference_ms, part.candidate_ms) < 0 for part in parts):
        yield "compute and exposed are estimates, each by itself: idle is what they leave, here less than 0"


def _is_rare(side: Dataset, name: str) -> bool:
    """Known in fewer than half of the judged steps of a run that could have it, which it must not choose for
    the other parts."""
    of_runs = [values_where_timed(run, name) for run in side.runs]
    return any(2 * np.isfinite(one).all(axis=0).sum() < one.shape[1] for one in of_runs)


def _series(judged: JudgedRun, metrics: dict[str, str]) -> dict[str, NDArray[np.float64]] | None:
    """Per part its mean over ranks, step by step; None where no step has them all."""
    names = {"step_ms": "step_ms", **metrics}
    values = {name: judged.values(metric) for name, metric in names.items()}
    complete = ~np.isnan(np.array(list(values.values()))).any(axis=(0, 1))
    if not complete.any():
        return None
    means = {name: value[:, complete].mean(axis=0) for name, value in values.items()}
    parts = {"step": means["step_ms"], "compute": means["compute_ms"]}
    if "exposed_ms" in means and "exposed_wait_ms" in means:
        parts["exposed_wait"] = means["exposed_wait_ms"]
        parts["exposed_transfer"] = means["exposed_ms"] - means["exposed_wait_ms"]
    elif "exposed_ms" in means:
        parts["exposed"] = means["exposed_ms"]
    if "exposed_copy_ms" in means and "idle_ms" in means:
        parts["exposed_copy"] = means["exposed_copy_ms"]
    # idle_ms is this rest, up to rounding; where idle is not known, the rest is not called so.
    rest = 2 * parts["step"] - np.sum(list(parts.values()), axis=0)
    parts["idle" if "idle_ms" in means else "not_measured"] = rest
    return parts


def _part(name: str, runs: list[list[dict[str, NDArray[np.float64]]]]) -> Part:
    reference, candidate = (float(np.mean([run[name].mean() for run in side])) for side in runs)
    found = [[estimate(run[name][None, :], "mean") for run in side] for side in runs]
    known = [[one for one in side if one is not None] for side in found]
    interval = None
    if all(len(one) == len(side) for one, side in zip(known, runs, strict=True)):
        interval = Interval(*contrast(known[0], known[1]).difference_interval)
    return Part(name, reference, candidate, candidate - reference, interval)


# ---- words -------------------------------------------------------------------------------------


def _scope(reference: Dataset, candidate: Dataset) -> str:
    r, c = len(reference.runs), len(candidate.runs)
    if r == c == 1:
        return (
            f"one run on each side: the claim is about these two runs only, not about {candidate.label}"
            f" and {reference.label} in general"
        )
    one = "" if min(r, c) > 1 else "; the side with one run is taken to vary as the other does"
    return (
        f"{r} run{'s' * (r > 1)} of {reference.label} and {c} of {candidate.label}:"
        f" the claim is about runs like these{one}"
    )


def _headline(
    reference: Dataset,
    candidate: Dataset,
    metrics: dict[str, MetricComparison],
    parts: Decomposition | None,
    work: Work | None,
) -> str:
    r, c = reference.label, candidate.label
    by = "calibrated" if _are_calibrated(reference, candidate) else ""
    if work is not None:
        return _headline_of_work(r, c, metrics, parts, work, by)
    step = metrics.get(MAIN)
    if step is None or step.verdict == "not judged" or step.ratio is None:
        why = step.reason if step else "no step times"
        return f"{c} against {r} is not judged: {why}{_sizes(r, c, metrics)}"
    change = f"{percent(step.ratio)}{percent_interval(step.interval)}"
    of_two = _of_two(reference, candidate)
    if step.verdict == "no difference seen":
        seen = ""
        if step.detectable is not None and step.reference:
            smallest = numbers.percent(step.detectable / step.reference, digits=1)
            seen = f"; a difference of {smallest} would be seen four times in five"
        why = f" ({step.reason})" if step.reason else ""
        return f"no difference seen in step time: {c} against {r} {change}{of_two}{seen}{why}"
    word = "slower" if step.verdict == "worse" else "faster"
    by = "calibrated" if _are_calibrated(reference, candidate) else ""
    return f"{c} is {word} than {r}: step time {change}{_mostly(parts, by)}{of_two}"


def _of_two(reference: Dataset, candidate: Dataset) -> str:
    """What a claim from one run on each side is about. A projection is no run."""
    is_projected = "projected" in (reference.source, candidate.source)
    return (
        ", in these two runs" if len(reference.runs) == len(candidate.runs) == 1 and not is_projected else ""
    )


def _headline_of_work(
    r: str, c: str, metrics: dict[str, MetricComparison], parts: Decomposition | None, work: Work, by: str
) -> str:
    """Steps of unlike work: what counts is work per time."""
    rate, step = metrics[PER_GPU], metrics.get(MAIN)
    of_step = f"; {work_text(work, None if step is None else step.ratio)}"
    rates = f"{number(rate.candidate)} against {number(rate.reference)} {rate_text(PER_GPU)}"
    if rate.verdict == "not judged" or rate.ratio is None:
        return f"{c} against {r} is not judged: {rate.reason}. Measured: {rates}{of_step}"
    change = f"{rates}, {percent(rate.ratio)}{percent_interval(rate.interval)}"
    if rate.verdict == "no difference seen":
        return f"no difference seen in {rate_text(PER_GPU)}: {c} {change}{of_step}"
    word = "slower" if rate.verdict == "worse" else "faster"
    if parts is None:
        return f"{c} is {word} than {r}: {change}{of_step}"
    same = f"; for the same tokens {number(parts.step.difference_ms, sign=True)} ms"
    return f"{c} is {word} than {r}: {change}{of_step}{same}{_mostly(parts, by)}"


def _sizes(r: str, c: str, metrics: dict[str, MetricComparison]) -> str:
    """What was measured where nothing can be judged: step times, or else how much of the time is exposed."""
    step, exposed = metrics.get(MAIN), metrics.get("exposed_per_step")
    if step is not None and step.difference is not None:
        return f". Step time: {c} {number(step.candidate)} ms, {r} {number(step.reference)} ms"
    if exposed is not None and exposed.difference is not None:
        shares = f"{c} {numbers.percent(exposed.candidate)}, {r} {numbers.percent(exposed.reference)}"
        return f". Share of exposed communication: {shares}"
    return ""


def _mostly(parts: Decomposition | None, by: str) -> str:
    """The part that moved most in the direction of the step: of means, which add up, unlike the medians."""
    if parts is None or not parts.parts or not parts.step.difference_ms:
        return ""
    whole = parts.step.difference_ms
    most = max(parts.parts, key=lambda part: np.sign(whole) * part.difference_ms)
    name = PART_WORDS.get(most.name, most.name)
    moved = number(most.difference_ms, sign=True)
    if abs(most.difference_ms) >= abs(whole):
        return f", all of it {name} ({with_word(f'mean {moved} ms', by)})"
    return f", most of it {name} ({with_word(f'mean {moved} of {number(whole, sign=True)} ms', by)})"


PART_WORDS = {
    "compute": "compute",
    "exposed": "exposed communication",
    "exposed_wait": "waiting for late ranks",
    "exposed_transfer": "exposed transfer",
    "exposed_copy": "exposed copies",
    "idle": "idle time",
    "not_measured": "time that was not measured",
}


def percent(ratio: float) -> str:
    return numbers.percent(ratio - 1, sign=True, digits=1)


def percent_interval(interval: Interval | None) -> str:
    if interval is None:
        return ""
    return f" [{100 * (interval.low - 1):+.1f}, {100 * (interval.high - 1):+.1f}]"


def _notes(
    reference: Dataset,
    candidate: Dataset,
    metrics: dict[str, MetricComparison],
    parts: Decomposition | None,
    rows: dict[str, _Row],
    num_judged: int,
    main: str,
) -> Iterator[str]:
    if reference.source != candidate.source:
        same = _kind_of_source(reference) == _kind_of_source(candidate)
        yield (
            f"sources differ ({reference.label}: {reference.source}, {candidate.label}: {candidate.source})"
            + ("" if same else ", and so do their definitions of compute; like is compared with like only")
        )
    yield from _calibration_notes(reference, candidate)
    for side in (reference, candidate):
        if text := partly_timed(side):
            yield f"{side.label}: {text}"
    for side in (reference, candidate):
        if side.source == "projected":
            yield f"{side.label}: a projection has no noise, intervals are of the other side alone"
    windows = [side.label for side in (reference, candidate) if is_window(side)]
    if len(windows) == 1:
        yield (
            f"{windows[0]} marks no steps: all that was read counts as one, so that only shares and"
            " bandwidths are set side by side, no times"
        )
    lengths = [min(judged.num_steps for judged in side.runs) for side in (reference, candidate)]
    if not windows and max(lengths) > UNLIKE_LENGTHS * min(lengths):
        yield (
            f"runs of unlike length ({reference.label}: {lengths[0]} judged steps, {candidate.label}:"
            f" {lengths[1]}): what settles slowly weighs on the shorter one, so intervals allow for what"
            " changes where both are taken over the same steps"
        )
    for side in (reference, candidate):
        if any(judged.run.run is None for judged in side.runs):
            yield f"{side.label}: without run.json its configuration is not known"
    own = [
        name
        for name, one in metrics.items()
        if name.startswith("duration_ms.") and one.p_adjusted is not None
    ]
    if own:
        yield _of_own_view(own, (reference, candidate))
    step_row = rows.get(MAIN)
    spread = step_row.contrast.explaining_spread() if step_row and step_row.contrast else None
    if spread is not None and "projected" not in (reference.source, candidate.source):
        yield (
            f"if runs of one and the same job differ in step time by {100 * spread:.2g} % (standard"
            " deviation) or more, this difference may be chance: two single runs cannot tell"
        )
    if num_judged:
        yield (
            f"{num_judged} metrics were looked at; the chance of any false alarm among them is at most"
            f" {100 * ALPHA:.0f} % (Holm's method, half of it for"
            f" {'the step time' if main == MAIN else rate_text(main)}). Intervals are 95 % each"
        )
    step = metrics.get(MAIN)
    if parts is None or step is None or step.difference is None or step.detectable is None or main != MAIN:
        return
    if abs(parts.step.difference_ms - step.difference) > step.detectable:
        of_timed = any(partly_timed(side) for side in (reference, candidate))
        yield (
            f"mean step times differ by {number(parts.step.difference_ms, sign=True)} ms, medians by"
            f" {number(step.difference, sign=True)} ms: "
            + ("the means are of the timed steps" if of_timed else "rare slow steps weigh on the means")
        )


def _of_own_view(durations: Sequence[str], sides: Sequence[Dataset]) -> str:
    """What durations that are judged hold, and bandwidths where none is of the transfer."""
    rates = [name.replace("duration_ms.", "busbw_gb_s.") for name in durations]
    if any("transfer" in bandwidths(side.runs, name) for side in sides for name in rates):
        return (
            "the time of a collective is of each rank's own view: waiting for late ranks is in it, because"
            " the ranks' clocks were not matched on both sides"
        )
    return (
        "the time of a collective, and its busbw, are of each rank's own view: waiting for late ranks is"
        " in it, because the ranks' clocks were not matched"
    )


def _calibration_notes(reference: Dataset, candidate: Dataset) -> Iterator[str]:
    sides = (reference, candidate)
    if _are_calibrated(reference, candidate):
        yield (
            "compute, comm, hidden, exposed, idle and their ratios are calibrated on both sides (events"
            " corrected by kernel traces of other steps); what is given per operation, and waiting, is raw"
        )
    own = [own_lead(side) == "calibrated" for side in sides]
    if reference.source != candidate.source or own[0] == own[1]:
        return
    have, lack = sides if own[0] else sides[::-1]
    why = f"of {lack.label} {few_calibrated(lack)}" if has_any(lack) else f"{lack.label} has none"
    yield (
        f"raw numbers are compared, though {have.label} has calibrated ones: {why}. Raw numbers are off by a"
        " part of comm that differs between devices and loads, which may look like a difference"
    )


# ---- what is configured differently ------------------------------------------------------------


def _differences(reference: Dataset, candidate: Dataset) -> Iterator[Setting]:
    sides = [side.first.run for side in (reference, candidate)]
    if len(sides[0].ranks) != len(sides[1].ranks):
        yield Setting("run", "ranks", *(str(len(side.ranks)) for side in sides))
    if reference.source != candidate.source:
        yield Setting("run", "source", reference.source, candidate.source)
    if sides[0].run is None or sides[1].run is None:
        return
    described = [_settings(side.run) for side in sides if side.run is not None]
    for group in described[0]:
        r, c = (settings[group] for settings in described)
        for name in dict.fromkeys((*r, *c)):
            if r.get(name) != c.get(name):
                yield Setting(group, name, r.get(name), c.get(name))


def _settings(run: RunRecord) -> dict[str, dict[str, str]]:
    """By group, the most telling first."""
    return {
        "devices": _devices(run.devices),
        "layout": dict(_flat(run.layout or {})),
        "model": dict(_flat(run.model or {})),
        "config": {k: v for k, v in _flat(run.config or {}) if k not in SPARE_SETTINGS},
        "run": {"placement": run.placement} if run.placement is not None else {},
        "versions": {name: version for name, version in run.versions.items() if version is not None},
        "environment": dict(run.environment),
    }


def _devices(devices: Sequence[dict[str, Any]]) -> dict[str, str]:
    names = [str(device.get("name")) for device in devices if device.get("name")]
    counts = {name: names.count(name) for name in dict.fromkeys(names)}
    return {"devices": ", ".join(f"{num} x {name}" for name, num in counts.items())} if counts else {}


def _flat(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value if isinstance(value, str) else json.dumps(value)
