"""A comparison in sentences: the answer, what it is about, and what to know of it."""

from collections.abc import Iterator, Sequence

from aorta.account import numbers
from aorta.account.judge.alike import (
    MAIN,
    PER_GPU,
    device_names,
    is_window,
    kind_of_source,
    rate_text,
    work_text,
)
from aorta.account.judge.cells import CELLS
from aorta.account.judge.judged import bandwidths
from aorta.account.judge.timed_steps import partly_timed
from aorta.account.metrics import metric_key, of_operation
from aorta.account.model import (
    ConfidenceInterval,
    Dataset,
    Decomposition,
    MetricComparison,
    Part,
    StepWork,
)
from aorta.account.numbers import number
from aorta.timeline.ratio import HOST_SPREAD, RUN_SPREAD, LogRatio, Spread
from aorta.timeline.statistics import ALPHA, LEVEL

UNLIKE_MEDIANS = 0.02
"""Ratio - 1 by which the ratio and that of the two medians may differ without a word."""
UNLIKE_LENGTHS = 2
"""Ratio of the runs' lengths above which it is said."""


def scope_text(reference: Dataset, candidate: Dataset, ratio: LogRatio | None, spread: Spread | None) -> str:
    """How many runs the verdict is from, and what it takes them to differ by."""
    r, c = len(reference.runs), len(candidate.runs)
    if r == c == 1:
        text = "one run on each side"
        if ratio is None or not float(ratio.spread):
            return text
        size = numbers.percent(float(ratio.spread), digits=1)
        if spread is not None:
            return f"{text}: runs differ by {size} (standard deviation, {spread.origin})"
        of_host = abs(float(ratio.spread) - HOST_SPREAD) < 1e-9
        of_steps = ", a third of what their steps do" if float(ratio.spread) > RUN_SPREAD else ""
        of_steps = ", as on cores that others may use" if of_host else of_steps
        return (
            f"{text}: runs of one job are taken to differ by {size} (standard deviation){of_steps};"
            " `aorta ab` measures it"
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
    matters: float,
) -> str:
    """By the step time; of steps of unlike work by work per time."""
    r, c, step = reference.label, candidate.label, metrics.get(MAIN)
    judged, rates, of_step = step, "step time", ""
    if work is not None:
        judged = metrics[PER_GPU]
        rates = f"{number(judged.candidate)} against {number(judged.reference)} {rate_text(PER_GPU)},"
        of_step = f"; {work_text(work, None if step is None else step.ratio)}"
    if judged is None or judged.verdict == "not judged" or judged.ratio is None:
        reason = "no step times" if judged is None else judged.reason
        measured = _sizes(r, c, metrics) if work is None else f". Measured: {rates[:-1]}{of_step}"
        return f"{c} against {r} is not judged: {reason}{measured}"
    change = f"{rates} {percent(judged.ratio)}{percent_interval(judged.interval)}{of_step}"
    if judged.verdict == "same":
        return f"{c} is as fast as {r} within {100 * matters:g} %: {change}"
    word = "faster" if (judged.ratio < 1) == (judged.direction == "lower") else "slower"
    if judged.verdict == "cannot tell":
        return f"cannot tell whether {c} is {word} than {r}: {change}; {judged.reason}"
    if work is not None and parts is not None:
        change += f"; for the same tokens {number(parts.step.difference_ms, sign=True)} ms"
    return f"{c} is {word} than {r}: {change}{_mostly(parts, word == 'slower')}"


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


def _mostly(parts: Decomposition | None, is_slower: bool) -> str:
    """The part and the phase that moved most in the direction of the step, where these are certain to have
    moved that way at all."""
    if parts is None or (parts.step.difference_ms > 0) != is_slower:
        return ""
    largest = _largest([(CELLS[part.name].title, part) for part in parts.parts], is_slower)
    if largest is None:
        return ""
    name, part = largest
    difference_ms = parts.step.difference_ms
    share = part.difference_ms / difference_ms
    words = "all of it" if share >= 1 else "most of it" if share >= 0.5 else "a part of it"
    of_step = "" if share >= 1 else f" of {number(difference_ms, sign=True)}"
    moved = f"{number(part.difference_ms, sign=True)}{of_step} ms"
    text = f", {words} {name} ({moved})"
    phase = _largest(
        [(one.title + (f" ({one.line})" if one.line else ""), one.part) for one in parts.phases], is_slower
    )
    return text if phase is None else f"{text}, most in {phase[0]}"


def _largest(parts: Sequence[tuple[str, Part]], is_slower: bool) -> tuple[str, Part] | None:
    """None where the interval of each holds no change, or is not known."""
    sign = 1 if is_slower else -1
    moved = [
        (name, part)
        for name, part in parts
        if part.interval is not None
        and sign * part.difference_ms > 0
        and (part.interval.low > 0 or part.interval.high < 0)
    ]
    return max(moved, key=lambda one: sign * one[1].difference_ms, default=None)


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
    main: str,
) -> Iterator[str]:
    """What to know of the answer, the most telling first."""
    if main == MAIN and (text := measured_text(metrics.get(MAIN), parts)):
        yield text
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
    devices = [device_names(side.first.noted.devices) for side in (reference, candidate)]
    if all(devices) and devices[0] != devices[1]:
        yield (
            "the devices differ, and with them libraries, drivers and clocks: what part each has in the"
            " change is not told"
        )
    windows = [side.label for side in (reference, candidate) if is_window(side)]
    if len(windows) == 1:
        yield (
            f"{windows[0]} marks no steps: the whole trace counts as one step, so shares and bandwidths are"
            " compared, but times are not"
        )
    lengths = [min(judged.num_judged for judged in side.runs) for side in (reference, candidate)]
    if not windows and max(lengths) > UNLIKE_LENGTHS * min(lengths):
        yield (
            f"the runs differ in length ({reference.label}: {lengths[0]} judged steps, {candidate.label}:"
            f" {lengths[1]}): the ratio is of the steps that both have"
        )
    for side in (reference, candidate):
        if any(judged.record is None for judged in side.runs):
            yield f"{side.label}: run.json is missing, so its configuration is not known"


def method_notes(
    reference: Dataset,
    candidate: Dataset,
    metrics: dict[str, MetricComparison],
    num_judged: int,
    main: str,
    assumed: float | None,
) -> Iterator[str]:
    """What numbers are of, and how often they are wrong.

    assumed: standard deviation between runs that nothing measured; None where runs show it, or it is given.
    """
    for side in (reference, candidate):
        if text := partly_timed(side):
            yield f"{side.label}: {text}"
    durations = [
        name
        for name, metric in metrics.items()
        if metric_key(name).name == "duration_ms" and metric.p_adjusted is not None
    ]
    if durations:
        yield _of_own_view(durations, (reference, candidate))
    if num_judged > 1:
        yield (
            f"{rate_text(main) if main != MAIN else 'step time'} is called different by chance in at most"
            f" {100 * ALPHA:.0f} % of such comparisons, and any of {num_judged - (main in metrics)} other"
            f" metrics in at most {100 * ALPHA:.0f} % (Holm's method). Each interval is a {LEVEL} interval"
        )
        if assumed:
            size = numbers.percent(assumed, digits=1)
            yield (
                f"these {100 * ALPHA:.0f} % and {LEVEL} hold if runs of one job differ by no more than the"
                f" {size} that are assumed"
            )


def measured_text(metric: MetricComparison | None, parts: Decomposition | None) -> str:
    """What the clock showed, where the comparison is of something else; '' where it is the same."""
    if metric is None or parts is None or not metric.reference or not metric.candidate:
        return ""
    medians = f"medians as measured: {number(metric.reference)} and {number(metric.candidate)} ms"
    change = f"{medians}, {percent(metric.candidate / metric.reference)}"
    if parts.is_net:
        return f"{change}; the comparison is without the time in which others had the cores"
    off = abs(parts.step.candidate_ms / metric.candidate - 1)
    return f"{change}; the comparison takes like steps together" if off > UNLIKE_MEDIANS else ""


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
