"""{label}_timeline.png: where each global step's time went."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numpy.typing import NDArray

from aorta.account.model import Dataset, JudgedRun
from aorta.account.numbers import MINUS, quantity
from aorta.page.parts import LIGHT
from aorta.page.table import device_text, elided

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
PARTS = (
    ("compute, no comm", LIGHT["compute"]),
    ("hidden comm (under compute)", LIGHT["hidden"]),
    ("exposed comm", LIGHT["exposed"]),
    ("idle", LIGHT["idle"]),
    ("not told apart", LIGHT["outline"]),
)
MAX_BARS = 400
"""Bars of a timeline; beyond it neighbouring steps share a bar, which shows their mean."""
MAX_WIDE_GAPS = 6
"""Gaps in the steps that are drawn wide enough for a text; more gaps than this are narrow."""
WIDE_GAP = 0.022
"""Width of a wide gap, as a part of all bars."""
FEW_BARS = 120
"""Bars that stand apart and each show their spread; more bars than this touch."""
MAX_LABELS = 8
LABEL_SHARE = 0.027
"""Room that a slanting label needs, as a part of the axis' width."""
HEADROOM = 1.2


def timeline_png(dataset: Dataset) -> bytes:
    return _png(timeline_figure(dataset))


def timeline_figure(dataset: Dataset) -> Figure:
    """Stacked bars, mean over ranks; thin lines give the least and the greatest rank's step."""
    judged = dataset.first
    figure = Figure(figsize=(11, 4.6), dpi=140, layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.add_subplot()

    bars = bars_of(judged)
    num_bars, per_bar = len(bars.place), bars.per_bar
    is_dense = num_bars > FEW_BARS
    width = 1.0 if is_dense else 0.86 if num_bars > 6 else 0.5
    bottom = np.zeros(num_bars)
    for (name, colour), measured in zip(PARTS, bars.parts, strict=True):
        height = np.nan_to_num(measured)
        is_rest = name == PARTS[-1][0]
        if np.isnan(measured).all() or (is_rest and not height.any()):
            continue
        axis.bar(bars.place, height, width, bottom, color=colour, label=name, linewidth=0)
        bottom = bottom + height
    if len(judged.run.ranks) > 1 and not np.isnan(bars.greatest).all():
        _draw_spread(axis, bars, is_dense)
    if not bars.peak.any():
        axis.text(0.5, 0.5, "neither steps nor their parts were measured", transform=axis.transAxes,
                  ha="center", color=LIGHT["muted"])  # fmt: skip

    top = _top(bars.peak, np.fmax(bars.greatest, bottom), bars.num_whole(judged.num_warmup))
    axis.set_ylim(0, top)
    axis.set_xlim(-0.5, bars.place[-1] + 0.5)
    _label_cut_off(axis, bars, top)
    _label_gaps(axis, bars)
    for number, (left, right) in enumerate(bars.extents(judged.num_warmup)):
        axis.axvspan(left, right, facecolor="none", edgecolor="#333333", hatch="////", alpha=0.55,
                     linewidth=0, label=None if number else "warm-up, not in the table")  # fmt: skip
    _label_steps(axis, bars)
    axis.set_xlabel("global step" if per_bar == 1 else f"global step ({per_bar} steps a bar, their mean)")
    axis.set_ylabel("ms per step")
    axis.grid(axis="y", color="#000000", alpha=0.12, linewidth=0.6)
    _bare(axis)
    mean_text = "   mean over ranks" if len(judged.run.ranks) > 1 else ""
    run_text = f"   first of {len(dataset.runs)} runs" if len(dataset.runs) > 1 else ""
    subtitle = f"{elided(dataset.label, 50)}   {device_text(judged)}"
    subtitle += f"   source: {dataset.source}{mean_text}{run_text}"
    figure.suptitle(
        _plain(subtitle),
        x=0.01, ha="left", fontsize=11, fontweight="bold",
    )  # fmt: skip
    if axis.get_legend_handles_labels()[0]:
        axis.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=9, reverse=True)
    return figure


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
    ranks, in ms, that add up to the step. NaN where a part was not measured."""
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
        """Start and end of each stretch of the first num_steps, without the gaps."""
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


def bars_of(judged: JudgedRun) -> Bars:
    run = judged.run
    compute, hidden, exposed, idle = (
        run.metrics[name] for name in ("compute_ms", "hidden_ms", "exposed_ms", "idle_ms")
    )
    rank_parts = [compute - hidden, hidden, exposed, idle]
    parts = [part.mean(axis=0) for part in rank_parts]
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


def _top(peak: Floats, highest: Floats, num_warmup_bars: int) -> float:
    """High enough for the usual steps; a rare slow one is cut off and labelled instead."""
    judged = highest[num_warmup_bars:] if num_warmup_bars < len(highest) else highest
    top = min(float(peak.max()) * 1.05, float(np.percentile(judged, 98)) * HEADROOM)
    return top if top > 0 else 1.0


def _draw_spread(axis: Axes, bars: Bars, is_dense: bool) -> None:
    label = "step, least to greatest rank"
    if is_dense:
        for stretch in bars.stretches:  # no line across steps that are not there
            for values in (bars.greatest, bars.least):
                axis.step(bars.place[stretch], values[stretch], where="mid", color="#222222", linewidth=0.7,
                          label=label)  # fmt: skip
                label = "_another"
        return
    axis.errorbar(
        bars.place, (bars.least + bars.greatest) / 2, yerr=(bars.greatest - bars.least) / 2, fmt="none",
        ecolor="#222222", elinewidth=0.9, capsize=2 if len(bars.place) <= 60 else 0, label=label,
    )  # fmt: skip


def _label_cut_off(axis: Axes, bars: Bars, top: float) -> None:
    """The highest first; one that would run into a higher one's label has none. Where steps share a bar,
    the label is that of its slowest step."""
    min_distance = LABEL_SHARE * (bars.place[-1] + 1)
    chosen: list[int] = []
    for bar in sorted(np.flatnonzero(bars.peak > top).tolist(), key=lambda bar: -bars.peak[bar]):
        if all(abs(bars.place[bar] - bars.place[labelled]) >= min_distance for labelled in chosen):
            chosen.append(bar)
    flat = chosen == [0]
    for bar in chosen[:MAX_LABELS]:
        axis.annotate(
            f"↑ {_ms(bars.peak[bar])}", (bars.place[bar], top), xytext=(0, 3), textcoords="offset points",
            fontsize=8, rotation=0 if flat else 60, ha="left", va="bottom", color="#444444",
            annotation_clip=False,
        )  # fmt: skip


def _label_gaps(axis: Axes, bars: Bars) -> None:
    if len(bars.gaps) > MAX_WIDE_GAPS:
        return
    for place, first, last in bars.gaps:
        steps_text = f"step {first}" if first == last else f"steps {first}–{last}"
        axis.text(
            place, 0.5, f"{steps_text} left out",
            transform=axis.get_xaxis_transform(), rotation=90, ha="center",
            va="center", fontsize=8, color=LIGHT["muted"],
        )  # fmt: skip


def _label_steps(axis: Axes, bars: Bars) -> None:
    num_bars = len(bars.place)
    at_least = -(-num_bars // 14)
    interval = next((nice for nice in (1, 2, 5, 10, 20, 25, 50, 100) if nice >= at_least), at_least)
    if bars.per_bar == 1:
        ticks = [i for i, step in enumerate(bars.first_step.tolist()) if step % interval == 0] or [0]
    else:
        ticks = list(range(0, num_bars, interval))
    axis.set_xticks(bars.place[ticks], [str(bars.first_step[i]) for i in ticks])


def _bare(axis: Axes) -> None:
    axis.set_axisbelow(True)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def _ms(value: float) -> str:
    return quantity(value, "ms", minus=MINUS)


def _plain(text: str) -> str:
    """Dollar signs would start a formula."""
    return text.replace("$", r"\$")


def _png(figure: Figure) -> bytes:
    buffer = BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "Glyph .* missing from font"
        )  # drawn as a box; the page has the text
        figure.savefig(buffer, format="png")
    return buffer.getvalue()
