"""The steps of a run as bars of a picture: how high, and where. Steps that are left out leave a gap."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from aorta.report.judge.leading import metric_of
from aorta.report.model import JudgedRun, Lead

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

MAX_BARS = 400
"""Above this, neighbouring steps share a bar (their mean)."""
MAX_WIDE_GAPS = 6
"""Up to this, gaps are wide enough for a text."""
WIDE_GAP = 0.022
"""Of all bars together."""


@dataclass(frozen=True, slots=True)
class Bars:
    """Places are in bars from the middle of the first one."""

    edges: Ints
    """Row of the first step of each bar, and at the end the number of rows."""
    place: Floats
    first_step: Ints
    """Global step of the first step of each bar."""
    per_bar: int
    """Steps a bar, at most."""
    parts: list[Floats]
    """compute without comm, hidden, exposed, idle, and what of the step is not told apart: means over
    ranks, in ms, that add up to the step. NaN where a part was not measured: where calibrated numbers lead,
    a step without them on some rank is not told apart."""
    least: Floats
    """Step of the fastest rank, in ms. NaN where it was not measured, as in most."""
    greatest: Floats
    peak: Floats
    """The slowest step of the bar on its slowest rank; where steps were not measured, the parts."""
    gaps: list[tuple[float, int, int]]
    """Place of the middle, first and last global step that has no bar."""

    @property
    def stretches(self) -> list[slice]:
        """Bars without a gap between them."""
        ends = np.flatnonzero(np.diff(self.place) > 1) + 1
        return [
            slice(lo, hi)
            for lo, hi in zip([0, *ends.tolist()], [*ends.tolist(), len(self.place)], strict=True)
        ]

    def num_whole(self, num_steps: int) -> int:
        """Bars that the first num_steps fill."""
        return int(np.searchsorted(self.edges[1:], num_steps, side="right"))

    def extents(self, num_steps: int) -> list[tuple[float, float]]:
        """From where to where the first num_steps reach, without the gaps."""
        extents = []
        for stretch in self.stretches:
            first, last = stretch.start, stretch.stop - 1
            if self.edges[first] >= num_steps:
                break
            last = min(last, int(np.searchsorted(self.edges, num_steps)) - 1)
            end = min(num_steps, int(self.edges[last + 1]))
            part = (end - self.edges[last]) / (self.edges[last + 1] - self.edges[last])
            extents.append((float(self.place[first]) - 0.5, float(self.place[last]) - 0.5 + float(part)))
        return extents


def bars_of(judged: JudgedRun, lead: Lead = "raw") -> Bars:
    run = judged.run
    compute, hidden, exposed, idle = (
        run.metrics[metric_of(lead, name)] for name in ("compute_ms", "hidden_ms", "exposed_ms", "idle_ms")
    )
    of_ranks = [compute - hidden, hidden, exposed, idle]
    parts = [part.mean(axis=0) for part in of_ranks]
    known_ms = np.nansum(parts, axis=0)
    step = run.metrics["step_ms"]
    rest_ms = np.where(np.isnan(parts).any(axis=0), step.mean(axis=0) - known_ms, 0.0)
    parts.append(np.maximum(rest_ms, 0.0))
    per_bar = -(-run.num_steps // MAX_BARS)
    breaks = _breaks(run.global_step)
    limits = [0, *breaks.tolist(), run.num_steps]
    starts = [np.arange(lo, hi, per_bar) for lo, hi in zip(limits, limits[1:], strict=False)]
    edges = np.array([*np.concatenate(starts).tolist(), run.num_steps], dtype=np.int64)

    def grouped(values: Floats, reduce: Callable[[Floats], np.floating] = np.nanmean) -> Floats:
        if per_bar == 1:
            return values
        pairs = zip(edges.tolist(), edges.tolist()[1:], strict=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # a bar without any value gives NaN, wanted here
            return np.array([reduce(values[lo:hi]) for lo, hi in pairs])

    num_bars = len(edges) - 1
    width = max(1.0, WIDE_GAP * num_bars) if len(breaks) <= MAX_WIDE_GAPS else 1.0
    place = np.arange(num_bars) + width * np.cumsum(np.isin(edges[:-1], breaks))
    behind = np.searchsorted(edges, breaks)
    return Bars(
        edges=edges,
        place=place,
        first_step=run.global_step[edges[:-1]],
        per_bar=per_bar,
        parts=[grouped(part, _share_of_all) for part in parts],
        least=grouped(step.min(axis=0)),
        greatest=grouped(step.max(axis=0)),
        peak=grouped(np.fmax(step.max(axis=0), known_ms), np.max),
        gaps=[
            (float(place[bar] + place[bar - 1]) / 2, int(run.global_step[row - 1]) + 1,
             int(run.global_step[row]) - 1)
            for bar, row in zip(behind.tolist(), breaks.tolist(), strict=True)
        ],
    )  # fmt: skip


def _share_of_all(values: Floats) -> np.floating:
    """Mean over all steps of a bar, so that its parts and what is not told apart add up to its mean step."""
    return np.float64(np.nan) if np.isnan(values).all() else np.nansum(values) / np.float64(len(values))


def _breaks(steps: Ints) -> Ints:
    """Rows before which steps are missing; where only every tenth step was recorded, that is no gap."""
    gaps = np.diff(steps)
    return np.flatnonzero(gaps > np.median(gaps)) + 1 if len(gaps) else gaps
