"""What a finding is worth: ms of the mean step, with an interval over steps."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from aorta.account.cause import CauseKind
from aorta.account.judge.occasional import Occasions, occasions
from aorta.account.numbers import quantity
from aorta.timeline.statistics import MIN_STEPS, estimate, side
from aorta.why.causes.finding import CauseFinding, Floats

NEARLY_ALL = 0.8
"""Part of the steps."""
RARE = 0.5
"""Median over mean below which a loss is in few steps."""
UNLIKE = 0.75
"""Mean over median below which it is not in all steps, as a loss in every second one."""
MENDED_ERROR = 0.3
"""By how much, as a ratio, mending may save more or less than the cells say: what hid behind a loss comes
out, and what is mended seldom goes to 0."""
MENDED_MORE = 0.65
"""By how much more where idle time alone tells the loss: kernels, copies and waits go with it. Of planted
losses mended, nine in ten were within these two; docs/evidence.md says in how many when each was left out."""
BY_IDLE_TIME: tuple[CauseKind, ...] = (
    "launch_bound",
    "synchronisation",
    "optimizer",
    "late_rank",
    "program_code",
)
"""Kinds that spans of the host or bytes do not bound."""
WIDEST = 4.0
"""Factor above which an interval tells nothing."""


@dataclass(frozen=True, slots=True)
class Worth:
    """Of one finding."""

    ms: float
    """Of the mean step."""
    interval_ms: tuple[float, float] | None
    """95 %"""
    why_no_interval: str = ""
    is_rare: bool = False
    occasions: Occasions | None = None
    """The steps that have the loss, where they come with a period or stand apart."""
    lasts: bool = False
    """The loss is sure, whatever its interval."""

    def is_sure(self, values: Floats, least_ms: float) -> bool:
        """Whether the loss is above half of what is named, with its interval or in nearly every step: where a
        run drifts, another one could lose much more or less, and yet there is no doubt of the loss."""
        if self.lasts or self.interval_ms is None or self.interval_ms[0] > least_ms / 2:
            return True
        finite = values[np.isfinite(values)]
        return bool((finite >= least_ms / 2).mean() >= NEARLY_ALL)

    def printed(
        self, most_ms: float, more_ms: float = 0.0, more: float = MENDED_ERROR
    ) -> tuple[tuple[float, float] | None, str]:
        """The interval of what mending saves, on a scale of ratios, which never reaches 0; or why there is
        none. most_ms: that it may come to. more_ms: what may go with the loss and is not in it. more: as
        MENDED_MORE."""
        if self.interval_ms is None or not self.ms > 0:
            return None, self.why_no_interval
        half = max(self.interval_ms[1] - self.ms, self.ms - self.interval_ms[0])
        interval = ratio_interval(self.ms, half, most_ms, more_ms, more)
        return interval, "" if interval else "the loss differs too much from step to step for an interval"

    @property
    def each_ms(self) -> float:
        """Of a step that has the loss."""
        return self.ms if self.occasions is None else self.occasions.each_ms

    @property
    def often(self) -> str:
        """', every third step'; '' where no period is known."""
        period = None if self.occasions is None else self.occasions.period
        return "" if self.occasions is None or period is None else f", {self.occasions.often}"

    def text(self, values: Floats) -> str:
        """How a loss in few steps adds up."""
        if self.occasions is not None:
            return f"in {self.occasions.text}"
        nonzero = values[np.nan_to_num(values) > 0]
        return (
            f"in {len(nonzero)} of {len(values)} steps, with a median of"
            f" {quantity(float(np.median(nonzero)), 'ms')}: the loss given is the mean over all steps"
        )


def ratio_interval(
    ms: float,
    half_width_ms: float,
    most_ms: float = math.inf,
    more_ms: float = 0.0,
    more: float = MENDED_ERROR,
) -> tuple[float, float] | None:
    """Of what mending saves, by the interval over steps; None where that tells nothing."""
    half = half_width_ms / ms
    if half > math.log(WIDEST):
        return None
    low, high = math.hypot(half, MENDED_ERROR), math.hypot(half, more)
    return ms * math.exp(-low), min((ms + more_ms) * math.exp(high), most_ms)


def worth(finding: CauseFinding, global_step: NDArray[np.int64]) -> Worth:
    """global_step: of each of the finding's steps."""
    values = finding.ms
    finite = values[np.isfinite(values)]
    if not len(finite) or not finite.any():
        return Worth(0.0, None, "no time is lost yet")
    if finding.occasions is not None:
        return Worth(*finding.occasions.mean_ms(), is_rare=True, occasions=finding.occasions, lasts=True)
    median, mean = float(np.median(finite)), finding.mean_ms
    is_rare = not finding.by_stretch and (median < RARE * mean or mean < UNLIKE * median)
    slow_steps = occasions(values, global_step, finding.slow_steps) if is_rare else None
    if slow_steps is not None:
        if slow_steps.period is None and slow_steps.are_most_of(has_it := values > 0):
            slow_steps = slow_steps.in_steps(has_it, np.nan_to_num(values))
        slow_ms, interval = slow_steps.mean_ms()
        low, high = (mean - slow_ms + edge for edge in interval)
        return Worth(mean, (low, high), is_rare=True, occasions=slow_steps, lasts=True)
    estimated = estimate(values[None, :], "mean")
    if estimated is None:
        few = f"too few judged steps for an interval: {len(finite)} of {MIN_STEPS}"
        return Worth(mean, None, few, is_rare, lasts=finding.is_sure)
    _, interval = side([estimated])
    return Worth(mean, interval, "", is_rare, lasts=finding.is_sure)
