"""{label}_timeline.png: where each global step's time went."""

from io import BytesIO

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numpy.typing import NDArray

from aorta.report.summary import Judged
from aorta.report.table import device_text

PARTS = (
    ("compute, no comm", "#4477aa"),
    ("hidden comm (under compute)", "#66ccee"),
    ("exposed comm", "#ee6677"),
    ("idle", "#dddddd"),
)
MAX_BARS = 400
"""Above this, neighbouring steps share a bar (their median)."""
FEW_BARS = 120
"""Up to this, bars stand apart and each shows its spread."""
MAX_LABELS = 8
HEADROOM = 1.2


def timeline_png(judged: Judged) -> bytes:
    """Stacked bars, median over ranks; thin lines give the least and the greatest rank's step."""
    dataset = judged.dataset
    figure = Figure(figsize=(11, 4.6), dpi=140, layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.add_subplot()

    steps, parts, (least, most), per_bar = _bars(judged)
    many = len(steps) > FEW_BARS
    width = 1.0 if many else 0.86 if len(steps) > 6 else 0.5
    bottom = np.zeros(len(steps))
    position = np.arange(len(steps), dtype=float)
    for (name, colour), height in zip(PARTS, parts, strict=True):
        axis.bar(position, height, width, bottom, color=colour, label=name, linewidth=0)
        bottom = bottom + height
    if len(dataset.ranks) > 1:
        _draw_spread(axis, position, least, most, many)

    top = _top(most, judged.num_warmup // per_bar)
    axis.set_ylim(0, top)
    for x in sorted(np.flatnonzero(most > top).tolist(), key=lambda x: -most[x])[:MAX_LABELS]:
        axis.annotate(
            f"↑ {most[x]:.0f} ms", (x, top), xytext=(0, 3), textcoords="offset points", fontsize=8,
            rotation=0 if x == 0 else 60, ha="left", va="bottom", color="#444444", annotation_clip=False,
        )  # fmt: skip
    if judged.num_warmup:
        axis.axvspan(-0.5, judged.num_warmup / per_bar - 0.5, facecolor="none", edgecolor="#333333",
                     hatch="////", alpha=0.55, linewidth=0, label="warm-up, not in the table")  # fmt: skip
    axis.set_xlim(-0.5, len(steps) - 0.5)
    _label_steps(axis, steps, per_bar)
    axis.set_xlabel("global step" if per_bar == 1 else f"global step ({per_bar} steps a bar, their median)")
    axis.set_ylabel("ms per step")
    axis.grid(axis="y", color="#000000", alpha=0.12, linewidth=0.6)
    axis.set_axisbelow(True)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    over = "   median over ranks" if len(dataset.ranks) > 1 else ""
    figure.suptitle(
        _plain(f"{dataset.label}   {device_text(dataset)}   source: {dataset.source}{over}"),
        x=0.01, ha="left", fontsize=11, fontweight="bold",
    )  # fmt: skip
    axis.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=9, reverse=True)

    buffer = BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


Floats = NDArray[np.float64]


def _bars(judged: Judged) -> tuple[NDArray[np.int64], list[Floats], tuple[Floats, Floats], int]:
    """First step of each bar, heights of PARTS, least and greatest step over ranks, steps a bar."""
    metrics = judged.dataset.metrics
    compute, hidden = metrics["compute_ms"], metrics["hidden_ms"]
    parts = [compute - hidden, hidden, metrics["exposed_ms"], metrics["idle_ms"]]
    step = np.nan_to_num(metrics["step_ms"])
    per_bar = -(-step.shape[1] // MAX_BARS)
    edges = np.arange(0, step.shape[1], per_bar)

    def grouped(values: Floats) -> Floats:
        if per_bar == 1:
            return values
        return np.array([np.median(values[i : i + per_bar]) for i in edges.tolist()])

    heights = [grouped(np.median(np.nan_to_num(part), axis=0)) for part in parts]
    spread = grouped(step.min(axis=0)), grouped(step.max(axis=0))
    return judged.dataset.global_step[edges], heights, spread, per_bar


def _top(most: Floats, num_warmup_bars: int) -> float:
    """High enough for the usual steps; a rare slow one is cut off and labelled instead."""
    judged = most[num_warmup_bars:] if num_warmup_bars < len(most) else most
    usual = float(np.percentile(judged, 98))
    highest = float(most.max())
    return max(min(highest * 1.05, usual * HEADROOM), 1e-6)


def _draw_spread(axis: Axes, position: Floats, least: Floats, most: Floats, many: bool) -> None:
    label = "step, least to greatest rank"
    if many:
        axis.step(position, most, where="mid", color="#222222", linewidth=0.7, label=label)
        axis.step(position, least, where="mid", color="#222222", linewidth=0.7)
        return
    axis.errorbar(
        position, (least + most) / 2, yerr=(most - least) / 2, fmt="none", ecolor="#222222",
        elinewidth=0.9, capsize=2 if len(position) <= 60 else 0, label=label,
    )  # fmt: skip


def _label_steps(axis: Axes, steps: NDArray[np.int64], per_bar: int) -> None:
    at_least = -(-len(steps) // 14)
    every = next((nice for nice in (1, 2, 5, 10, 20, 25, 50, 100) if nice >= at_least), at_least)
    if per_bar == 1:
        ticks = [i for i, step in enumerate(steps.tolist()) if step % every == 0] or [0]
    else:
        ticks = list(range(0, len(steps), every))
    axis.set_xticks(ticks, [str(steps[i]) for i in ticks])


def _plain(text: str) -> str:
    """Dollar signs would start a formula."""
    return text.replace("$", r"\$")
