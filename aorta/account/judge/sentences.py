"""A comparison in sentences: the answer, what it is about, and what to know of it."""

from collections.abc import Iterator, Sequence

import numpy as np

from aorta.account import numbers
from aorta.account.judge.alike import MAIN, are_calibrated, is_window, kind_of_source
from aorta.account.judge.cells import CELLS
from aorta.account.judge.judged import bandwidths
from aorta.account.judge.leading import few_calibrated, has_any, own_lead, partly_timed, with_word
from aorta.account.judge.work import PER_GPU, rate_text, work_text
from aorta.account.metrics import metric_key, of_operation
from aorta.account.model import ConfidenceInterval, Dataset, Decomposition, MetricComparison, StepWork
from aorta.account.numbers import number
from aorta.timeline.statistics import (
    ALPHA,
    LEVEL,
    UNLIKE_LENGTHS,
    Contrast,
)


def scope_text(reference: Dataset, candidate: Dataset) -> str:
    r, c = len(reference.runs), len(candidate.runs)
    if r == c == 1:
        return (
            f"one run on each side: the verdict holds for these two runs, not for {candidate.label}"
            f" and {reference.label} in general"
        )
    single_run_text = "" if min(r, c) > 1 else "; the side with one run is assumed to vary as the other does"
    return (
        f"{r} run{'s' * (r > 1)} of {reference.label} and {c} of {candidate.label}:"
        f" the verdict holds for runs like these{single_run_text}"
    )


def headline(
    reference: Dataset,
    candidate: Dataset,
    metrics: dict[str, MetricComparison],
    parts: Decomposition | None,
    work: StepWork | None,
) -> str:
    r, c = reference.label, candidate.label
    lead_word = "calibrated" if are_calibrated(reference, candidate) else ""
    if work is not None:
        return _headline_of_work(r, c, metrics, parts, work, lead_word)
    step = metrics.get(MAIN)
    if step is None or step.verdict == "not judged" or step.ratio is None:
        reason = step.reason if step else "no step times"
        return f"{c} against {r} is not judged: {reason}{_sizes(r, c, metrics)}"
    change = f"{percent(step.ratio)}{percent_interval(step.interval)}"
    of_two = _of_two(reference, candidate)
    if step.verdict == "no difference seen":
        detectable_text = ""
        if step.detectable is not None and step.reference:
            smallest = numbers.percent(step.detectable / step.reference, digits=1)
            detectable_text = f"; a difference of {smallest} would be detected four times in five"
        reason = f" ({step.reason})" if step.reason else ""
        return f"no difference seen in step time: {c} against {r} {change}{of_two}{detectable_text}{reason}"
    if step.verdict == "cannot tell":
        return f"cannot tell whether {c} is {_word(step)} than {r}: step time {change}{of_two}; {step.reason}"
    return f"{c} is {_word(step)} than {r}: step time {change}{_mostly(parts, lead_word)}{of_two}"


def _word(metric: MetricComparison) -> str:
    is_lower = metric.difference is not None and metric.difference < 0
    return "faster" if is_lower == (metric.direction == "lower") else "slower"


def _of_two(reference: Dataset, candidate: Dataset) -> str:
    """Scope of a claim from one run on each side; '' with a projection, which is no run."""
    is_projected = "projected" in (reference.source, candidate.source)
    return (
        ", in these two runs" if len(reference.runs) == len(candidate.runs) == 1 and not is_projected else ""
    )


def _headline_of_work(
    r: str,
    c: str,
    metrics: dict[str, MetricComparison],
    parts: Decomposition | None,
    work: StepWork,
    lead_word: str,
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
    word = _word(rate)
    if rate.verdict == "cannot tell":
        return f"cannot tell whether {c} is {word} than {r}: {change}{of_step}; {rate.reason}"
    if parts is None:
        return f"{c} is {word} than {r}: {change}{of_step}"
    same_work_text = f"; for the same tokens {number(parts.step.difference_ms, sign=True)} ms"
    return f"{c} is {word} than {r}: {change}{of_step}{same_work_text}{_mostly(parts, lead_word)}"


def _sizes(r: str, c: str, metrics: dict[str, MetricComparison]) -> str:
    """Sizes that were measured where nothing can be judged: step times, or else how much of the time is
    exposed."""
    step, exposed = metrics.get(MAIN), metrics.get("exposed_per_step")
    if step is not None and step.difference is not None:
        return f". Step time: {c} {number(step.candidate)} ms, {r} {number(step.reference)} ms"
    if exposed is not None and exposed.difference is not None:
        shares = f"{c} {numbers.percent(exposed.candidate)}, {r} {numbers.percent(exposed.reference)}"
        return f". Share of exposed communication: {shares}"
    return ""


def _mostly(parts: Decomposition | None, lead_word: str) -> str:
    """The part that moved most in the direction of the step: of means, which add up, unlike the medians."""
    if parts is None or not parts.parts or not parts.step.difference_ms:
        return ""
    difference_ms = parts.step.difference_ms
    largest = max(parts.cells or parts.parts, key=lambda part: np.sign(difference_ms) * part.difference_ms)
    name = PART_WORDS.get(largest.name) or CELLS[largest.name].title
    moved = number(largest.difference_ms, sign=True)
    if abs(largest.difference_ms) >= abs(difference_ms):
        return f", all of it {name} ({with_word(f'mean {moved} ms', lead_word)})"
    share = f"mean {moved} of {number(difference_ms, sign=True)} ms"
    return f", most of it {name} ({with_word(share, lead_word)})"


PART_WORDS = {
    "compute": "compute",
    "exposed": "exposed communication",
    "communication": "exposed communication",
    "copy": "exposed copies",
    "exposed_wait": "waiting for late ranks",
    "wait": "waiting for late ranks",
    "transfer": "exposed transfer",
    "exposed_transfer": "exposed transfer",
    "exposed_copy": "exposed copies",
    "idle": "idle time",
    "not_measured": "time that was not measured",
}


def percent(ratio: float) -> str:
    return numbers.percent(ratio - 1, sign=True, digits=1)


def percent_interval(interval: ConfidenceInterval | None) -> str:
    if interval is None:
        return ""
    return f" [{100 * (interval.low - 1):+.1f}, {100 * (interval.high - 1):+.1f}]"


def comparison_notes(
    reference: Dataset,
    candidate: Dataset,
    metrics: dict[str, MetricComparison],
    parts: Decomposition | None,
    step_contrast: Contrast | None,
    num_judged: int,
    main: str,
) -> Iterator[str]:
    if reference.source != candidate.source:
        is_same_kind = kind_of_source(reference) == kind_of_source(candidate)
        yield (
            f"sources differ ({reference.label}: {reference.source}, {candidate.label}: {candidate.source})"
            + (
                ""
                if is_same_kind
                else ", and so do their definitions of compute: only metrics of one definition are compared"
            )
        )
    yield from _calibration_notes(reference, candidate)
    for side in (reference, candidate):
        if text := partly_timed(side):
            yield f"{side.label}: {text}"
    for side in (reference, candidate):
        if side.source == "projected":
            yield f"{side.label}: a projection has no noise: the intervals come from the other side alone"
    windows = [side.label for side in (reference, candidate) if is_window(side)]
    if len(windows) == 1:
        yield (
            f"{windows[0]} marks no steps: the whole trace counts as one step, so shares and bandwidths are"
            " compared, but times are not"
        )
    lengths = [min(judged.num_steps for judged in side.runs) for side in (reference, candidate)]
    if not windows and max(lengths) > UNLIKE_LENGTHS * min(lengths):
        yield (
            f"the runs differ in length ({reference.label}: {lengths[0]} judged steps, {candidate.label}:"
            f" {lengths[1]}): slow settling weighs more on the shorter one, so the intervals allow for what"
            " changes when both are taken over the same steps"
        )
    for side in (reference, candidate):
        if any(judged.run.run is None for judged in side.runs):
            yield f"{side.label}: run.json is missing, so its configuration is not known"
    durations = [
        name
        for name, metric in metrics.items()
        if metric_key(name).name == "duration_ms" and metric.p_adjusted is not None
    ]
    if durations:
        yield _of_own_view(durations, (reference, candidate))
    spread = step_contrast.explaining_spread() if step_contrast else None
    if spread is not None and "projected" not in (reference.source, candidate.source):
        yield (
            f"if repeated runs of the same job vary by {100 * spread:.2g} % or more in step time (standard"
            " deviation), this difference may be chance; one run on each side cannot tell"
        )
    if num_judged:
        yield (
            f"{num_judged} metrics were tested; the chance of any false alarm among them is at most"
            f" {100 * ALPHA:.0f} % (Holm's method, half of it for"
            f" {'the step time' if main == MAIN else rate_text(main)}). Each interval is a {LEVEL} interval"
        )
    step = metrics.get(MAIN)
    if parts is None or step is None or step.difference is None or step.detectable is None or main != MAIN:
        return
    if abs(parts.step.difference_ms - step.difference) > step.detectable:
        of_timed = any(partly_timed(side) for side in (reference, candidate))
        yield (
            f"mean step times differ by {number(parts.step.difference_ms, sign=True)} ms, medians by"
            f" {number(step.difference, sign=True)} ms: "
            + ("the means are those of the timed steps" if of_timed else "rare slow steps move the means")
        )


def _of_own_view(durations: Sequence[str], sides: Sequence[Dataset]) -> str:
    """Note that judged durations hold waiting, and bandwidths where none is of the transfer."""
    rates = [of_operation("busbw_gb_s", metric_key(name).operation) for name in durations]
    if any("transfer" in bandwidths(side.runs, name) for side in sides for name in rates):
        return (
            "collective times are as each rank saw them and include waiting for late ranks, because the"
            " ranks' clocks were not matched on both sides"
        )
    return (
        "collective times and busbw are as each rank saw them and include waiting for late ranks, because"
        " the ranks' clocks were not matched"
    )


def _calibration_notes(reference: Dataset, candidate: Dataset) -> Iterator[str]:
    sides = (reference, candidate)
    if are_calibrated(reference, candidate):
        yield (
            "compute, comm, hidden, exposed, idle and their ratios are calibrated on both sides (events"
            " corrected by kernel traces of other steps); numbers per operation and waiting are raw"
        )
    is_calibrated = [own_lead(side) == "calibrated" for side in sides]
    if reference.source != candidate.source or is_calibrated[0] == is_calibrated[1]:
        return
    have, lack = sides if is_calibrated[0] else sides[::-1]
    reason = f"of {lack.label} {few_calibrated(lack)}" if has_any(lack) else f"{lack.label} has none"
    yield (
        f"raw numbers are compared, although {have.label} has calibrated ones: {reason}. The error of raw"
        " numbers depends on the device and its load, and may look like a difference"
    )
