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
FEW_BARS = 120
"""Bars that stand apart; more bars than this touch."""
MAX_LABELS = 8
LABEL_SHARE = 0.027
"""Room that a slanting label needs, as a part of the axis' width."""
HEADROOM = 1.2


def timeline_png(dataset: Dataset) -> bytes:
    return _png(timeline_figure(dataset))


def timeline_figure(dataset: Dataset) -> Figure:
    """Stacked bars, mean over ranks; thin lines give the least and the greatest rank's step. Bars stand one
    beside the other, whichever steps lie between them; those that are cut off have their length above."""
    judged = dataset.first
    figure = Figure(figsize=(11, 4.6), dpi=140, layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.add_subplot()
    bars = bars_of(judged)
    place = np.arange(len(bars.first_step))
    bottom = np.zeros(len(place))
    for (name, colour), measured in zip(PARTS, bars.parts, strict=True):
        height = np.nan_to_num(measured)
        if np.isnan(measured).all() or (name == PARTS[-1][0] and not height.any()):
            continue
        axis.bar(place, height, 0.86 if len(place) <= FEW_BARS else 1.0, bottom, color=colour, label=name)
        bottom = bottom + height
    if len(judged.run.ranks) > 1 and not np.isnan(bars.greatest).all():
        for values, label in ((bars.greatest, "step, least to greatest rank"), (bars.least, "_another")):
            axis.step(place, values, where="mid", color="#222222", linewidth=0.7, label=label)
    if not bars.peak.any():
        axis.text(0.5, 0.5, "neither steps nor their parts were measured", transform=axis.transAxes,
                  ha="center", color=LIGHT["muted"])  # fmt: skip
    num_warmup = judged.num_warmup / bars.per_bar
    top = _top(bars.peak, np.fmax(bars.greatest, bottom), int(num_warmup))
    axis.set_ylim(0, top)
    axis.set_xlim(-0.5, len(place) - 0.5)
    _label_cut_off(axis, bars.peak, top)
    if num_warmup:
        axis.axvspan(-0.5, num_warmup - 0.5, facecolor="none", edgecolor="#333333", hatch="////", alpha=0.55,
                     linewidth=0, label="warm-up, not in the table")  # fmt: skip
    ticks = place[:: max(1, -(-len(place) // 14))]
    axis.set_xticks(ticks, [str(bars.first_step[i]) for i in ticks])
    per_bar = bars.per_bar
    axis.set_xlabel("global step" if per_bar == 1 else f"global step ({per_bar} steps a bar, their mean)")
    axis.set_ylabel("ms per step")
    axis.grid(axis="y", color="#000000", alpha=0.12, linewidth=0.6)
    _bare(axis)
    mean_text = "   mean over ranks" if len(judged.run.ranks) > 1 else ""
    run_text = f"   first of {len(dataset.runs)} runs" if len(dataset.runs) > 1 else ""
    subtitle = f"{elided(dataset.label, 50)}   {device_text(judged)}"
    subtitle += f"   source: {dataset.source}{mean_text}{run_text}"
    figure.suptitle(_plain(subtitle), x=0.01, ha="left", fontsize=11, fontweight="bold")
    if axis.get_legend_handles_labels()[0]:
        axis.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=9, reverse=True)
    return figure


@dataclass(frozen=True, slots=True)
class Bars:
    """Each of per_bar steps; [bar], in ms."""

    first_step: Ints
    """Global step of the first step of each bar."""
    per_bar: int
    """Steps a bar, at most."""
    parts: list[Floats]
    """compute without comm, hidden, exposed, idle, and what of the step is not told apart: means over
    ranks that add up to the step. NaN where a part was not measured."""
    least: Floats
    """Step of the fastest rank. NaN where it was not measured, as in most."""
    greatest: Floats
    peak: Floats
    """The slowest step of the bar on its slowest rank; where steps were not measured, the parts."""


def bars_of(judged: JudgedRun) -> Bars:
    run = judged.run
    compute, hidden, exposed, idle = (
        run.metrics[name] for name in ("compute_ms", "hidden_ms", "exposed_ms", "idle_ms")
    )
    parts = [part.mean(axis=0) for part in (compute - hidden, hidden, exposed, idle)]
    known_ms = np.nansum(parts, axis=0)
    step = run.metrics["step_ms"]
    rest_ms = np.where(np.isnan(parts).any(axis=0), step.mean(axis=0) - known_ms, 0.0)
    parts.append(np.maximum(rest_ms, 0.0))
    per_bar = -(-run.num_steps // MAX_BARS)
    firsts = range(0, run.num_steps, per_bar)

    def grouped(values: Floats, reduce: Callable[[Floats], np.floating]) -> Floats:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # a bar without any value gives NaN, wanted here
            return np.array([reduce(values[first : first + per_bar]) for first in firsts])

    return Bars(
        first_step=run.global_step[::per_bar],
        per_bar=per_bar,
        parts=[grouped(part, _share_of_all) for part in parts],
        least=grouped(step.min(axis=0), np.nanmean),
        greatest=grouped(step.max(axis=0), np.nanmean),
        peak=grouped(np.fmax(step.max(axis=0), known_ms), np.max),
    )


def _share_of_all(values: Floats) -> np.floating:
    """Mean over all steps of a bar, so that its parts and what is not told apart add up to its mean step."""
    return np.float64(np.nan) if np.isnan(values).all() else np.nansum(values) / np.float64(len(values))


def _top(peak: Floats, highest: Floats, num_warmup: int) -> float:
    """High enough for the usual steps; a rare slow one is cut off and labelled instead."""
    judged = highest[num_warmup:] if num_warmup < len(highest) else highest
    top = min(float(peak.max()) * 1.05, float(np.percentile(judged, 98)) * HEADROOM)
    return top if top > 0 else 1.0


def _label_cut_off(axis: Axes, peak: Floats, top: float) -> None:
    """The highest first; one that would run into a higher one's label has none. Where steps share a bar,
    the label is that of its slowest step."""
    chosen: list[int] = []
    for bar in sorted(np.flatnonzero(peak > top).tolist(), key=lambda bar: -peak[bar]):
        if all(abs(bar - labelled) >= LABEL_SHARE * len(peak) for labelled in chosen):
            chosen.append(bar)
    for bar in chosen[:MAX_LABELS]:
        axis.annotate(
            f"↑ {_ms(peak[bar])}", (bar, top), xytext=(0, 3), textcoords="offset points", fontsize=8,
            rotation=60, ha="left", va="bottom", color="#444444", annotation_clip=False,
        )  # fmt: skip


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
