"""What the cells of a matrix do beside its baseline: to every metric, and to how often a run fails.

Of a metric, the logarithm of each run is its round's part, its cell's part and noise; a cell is judged by its
differences to the baseline within rounds. Their error is the largest of three: what these differences
scatter by, what the noise of all cells together does, and that of the others with the baseline's own. Few
rounds tell the first badly, and a cell or the baseline may be noisier than the others; the more the larger
stands out, the fewer degrees of freedom it counts with. Intervals of a table hold all at once in 95 % of
matrices (Bonferroni, over cells and metrics), and so do failures (Fisher's exact test, over cells).
"""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import msgspec
import numpy as np

from aorta.sweep.metrics import RunMetric
from aorta.sweep.series import Series, Variant
from aorta.timeline.arrays import Floats
from aorta.timeline.statistics import ALPHA

Verdict = Literal[
    "slower", "faster", "better", "worse", "higher", "lower", "same", "cannot tell", "not judged"
]
FailureVerdict = Literal["fails more often", "fails less often", "cannot tell", ""]


class Effect(msgspec.Struct, frozen=True):
    """Of a cell on a metric, against the baseline."""

    metric: str
    unit: str
    value: float | None
    """Median over the runs of the cell."""
    ratio: float | None
    interval: tuple[float, float] | None
    verdict: Verdict
    reason: str
    num_rounds: int


class FailureRate(msgspec.Struct, frozen=True):
    num_failed: int
    num_runs: int
    interval: tuple[float, float]
    """95 %, of the share that fails (Clopper and Pearson); of this cell alone."""
    verdict: FailureVerdict
    first_line: str


class CellResult(msgspec.Struct, frozen=True):
    name: str
    command: str
    is_baseline: bool
    failures: FailureRate
    effects: list[Effect]
    notes: list[str]


def results_of(series: Series, slower_by: float | None = None) -> list[CellResult]:
    """The baseline first. slower_by: ratio - 1 from which on a cell that fails less may be merely slower;
    None: what matters."""
    from aorta.sweep.series import shown

    baseline, *others = series.variants
    num_compared = max(1, len(others))
    effects: dict[str, list[Effect]] = {variant.name: [] for variant in series.variants}
    for metric in series.metrics:
        for variant, effect in _effects(series, metric, num_compared * len(series.metrics)):
            effects[variant.name].append(effect)
    found = []
    base_rate = _counts(series, baseline)
    for variant in series.variants:
        rate, of_cell = _rate(series, variant, base_rate, num_compared), effects[variant.name]
        is_baseline = variant is baseline
        notes = [] if is_baseline else _notes(base_rate, rate, of_cell, series, slower_by)
        found.append(CellResult(variant.name, shown(variant), is_baseline, rate, of_cell, notes))
    return found


# ---- metrics -----------------------------------------------------------------------------------


def _effects(series: Series, metric: RunMetric, family: int) -> list[tuple[Variant, Effect]]:
    values = np.array(
        [[math.nan if v is None else v for v in series.values(metric, cell)] for cell in series.variants]
    )
    medians = [_median(row) for row in values]
    head = (metric.name, metric.unit)
    found = [(series.variants[0], Effect(*head, medians[0], None, None, "not judged", "the baseline", 0))]
    present = values[np.isfinite(values)]
    if present.size and present.min() <= 0:
        reason = "some values are 0 or less: a ratio tells nothing"
        return found + [
            (cell, Effect(*head, median, None, None, "not judged", reason, 0))
            for cell, median in zip(series.variants[1:], medians[1:], strict=True)
        ]
    logs = np.log(values)
    noise = Noise.of(logs)
    for number, cell in enumerate(series.variants[1:], start=1):
        apart = logs[number] - logs[0]
        apart = apart[np.isfinite(apart)]
        interval = noise.interval(apart, ALPHA / family)
        verdict, reason = _verdict(series, metric, apart, interval)
        ratio = float(math.exp(apart.mean())) if apart.size else None
        bounds = None if interval is None else (math.exp(interval[0]), math.exp(interval[1]))
        effect = Effect(*head, medians[number], ratio, bounds, verdict, reason, int(apart.size))
        found.append((cell, effect))
    return found


def _median(values: Floats) -> float | None:
    present = values[np.isfinite(values)]
    return float(np.median(present)) if present.size else None


def common_noise(logs: Floats) -> tuple[float, int]:
    """Variance of what [cell, round] has beside its cell and its round, over all cells, and its degrees of
    freedom; 0 of 0 where there are none."""
    is_known = np.isfinite(logs)
    cells, rounds = np.nonzero(is_known)
    num_cells, num_rounds = logs.shape
    design = np.zeros((cells.size, num_cells + num_rounds))
    design[np.arange(cells.size), cells] = 1
    design[np.arange(cells.size), num_cells + rounds] = 1
    if not cells.size:
        return 0.0, 0
    values = logs[is_known]
    fitted, _, rank, _ = np.linalg.lstsq(design, values, rcond=None)
    freedom = int(cells.size - rank)
    if freedom <= 0:
        return 0.0, 0
    return float(((values - design @ fitted) ** 2).sum()) / freedom, freedom


class Noise(NamedTuple):
    """What the differences of cells to the baseline may scatter by."""

    common: float
    """Variance of a single run, over all cells."""
    freedom: int
    of_baseline: float
    """Variance of a difference to the baseline, by the baseline's own noise and that of the other cells."""

    @classmethod
    def of(cls, logs: Floats) -> "Noise":
        """Of [cell, round], the baseline first."""
        common, freedom = common_noise(logs)
        if len(logs) < 3:
            return cls(common, freedom, 0.0)
        others, _ = common_noise(logs[1:])
        has_others = np.isfinite(logs[1:]).any(axis=0)
        apart = logs[0, has_others] - np.nanmean(logs[1:, has_others], axis=0)
        apart = apart[np.isfinite(apart)]
        return cls(common, freedom, float(apart.var(ddof=1)) + others if apart.size > 1 else 0.0)

    def interval(self, apart: Floats, alpha: float) -> tuple[float, float] | None:
        """Of the mean of differences to the baseline, one a round; None for fewer than 2."""
        from scipy.special import stdtrit

        num = int(apart.size)
        if num < 2:
            return None
        mean = float(apart.mean())
        variance = max(float(apart.var(ddof=1)), 2 * self.common, self.of_baseline)
        freedom = float(num - 1)
        if self.freedom > freedom and variance > 0:
            freedom += (self.freedom - freedom) * (2 * self.common / variance) ** 2
        half = math.sqrt(variance / num) * float(stdtrit(freedom, 1 - alpha / 2))
        return mean - half, mean + half


def _verdict(
    series: Series, metric: RunMetric, apart: Floats, interval: tuple[float, float] | None
) -> tuple[Verdict, str]:
    if interval is None:
        if apart.size == 1:
            return "cannot tell", "one round tells no scatter"
        return "not judged", "no round in which both ended with this number"
    low, high = interval
    margin = math.log1p(series.matters)
    if -margin <= low and high <= margin:
        return "same", ""
    if low <= 0 <= high:
        return "cannot tell", ""
    is_higher = low > 0
    if metric.unit in ("ms", "s"):
        return ("slower" if is_higher else "faster"), ""
    if metric.better == "neither":
        return ("higher" if is_higher else "lower"), ""
    return ("better" if is_higher == (metric.better == "higher") else "worse"), ""


# ---- failures ----------------------------------------------------------------------------------


def _counts(series: Series, variant: Variant) -> tuple[int, int]:
    return len(series.failed(variant)), len(series.done(variant))


def _rate(series: Series, variant: Variant, baseline: tuple[int, int], family: int) -> FailureRate:
    failed, done = _counts(series, variant)
    verdict: FailureVerdict = ""
    if variant is not series.variants[0] and done and baseline[1] and (failed or baseline[0]):
        p_value = fisher(failed, done, *baseline)
        is_more = failed * baseline[1] > baseline[0] * done
        verdict = "cannot tell"
        if p_value * family <= ALPHA:
            verdict = "fails more often" if is_more else "fails less often"
    lines = [run.failure for run in series.failed(variant) if run.failure]
    return FailureRate(failed, done, share_interval(failed, done), verdict, lines[0] if lines else "")


def share_interval(num: int, total: int) -> tuple[float, float]:
    """Clopper and Pearson's interval of a share; (0, 1) of nothing."""
    from scipy.stats import binomtest

    if total == 0:
        return 0.0, 1.0
    interval = binomtest(num, total).proportion_ci(1 - ALPHA)
    return float(interval.low), float(interval.high)


def fisher(failed_a: int, total_a: int, failed_b: int, total_b: int) -> float:
    """Two-sided p-value of Fisher's exact test that two shares are one."""
    from scipy.stats import fisher_exact

    table = np.array([[failed_a, total_a - failed_a], [failed_b, total_b - failed_b]])
    return float(fisher_exact(table).pvalue)


def _notes(
    baseline: tuple[int, int],
    rate: FailureRate,
    effects: Sequence[Effect],
    series: Series,
    slower_by: float | None,
) -> list[str]:
    """Where a cell fails less than the baseline: whether it may only be slower, which hides what hangs on
    time."""
    if not rate.num_runs or not baseline[1] or rate.num_failed * baseline[1] >= baseline[0] * rate.num_runs:
        return []
    fewer = f"{rate.num_failed} of {rate.num_runs} failed against {baseline[0]} of {baseline[1]}"
    times = [effect for effect in effects if effect.unit in ("ms", "s") and effect.ratio is not None]
    if not times:
        return [f"{fewer}: whether it is only slower cannot be told, no round has times of both"]
    effect = times[0]
    assert effect.ratio is not None
    limit = math.log1p(series.matters if slower_by is None else slower_by)
    if effect.interval is not None and math.log(effect.interval[1]) <= limit:
        return [f"{fewer}, and it is not slower"]
    if math.log(effect.ratio) > limit:
        how = "is" if effect.interval is not None and effect.interval[0] > 1 else "may be"
        return [
            f"{fewer}, and it {how} slower ({effect.metric} x {effect.ratio:.2f} in runs that ended well):"
            " a fault that hangs on timing may be hidden, not cured"
        ]
    return [f"{fewer}: whether it is only slower cannot be told ({effect.metric} x {effect.ratio:.2f})"]
