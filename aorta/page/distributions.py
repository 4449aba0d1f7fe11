"""The page's section "Distributions": every metric over steps, drawn by distributions.js."""

import base64
import gzip
import warnings
from collections.abc import Callable, Iterable
from functools import cache
from importlib import resources
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aorta.account.metrics import COUNTED, MEASURES, metric_key
from aorta.account.model import JudgedRun, Report
from aorta.page.parts import Markup, number, tag, title, unit

MAX_STEPS = 500
"""Steps shown of a run; a longer run shows every second, third, ... step."""
FIRST = ("step_ms", "exposed_ms", "comm_ms", "compute_ms", "hidden_ms", "idle_ms", "overlap_ratio")


def distribution_data(report: Report) -> dict[str, Any]:
    """Per run and metric the median, least and greatest rank of every step; null where not measured."""
    runs = [
        (dataset.label if len(dataset.runs) == 1 else f"{dataset.label} ({i + 1})", dataset.label, judged)
        for dataset in report.datasets.values()
        for i, judged in enumerate(dataset.runs)
    ]
    names = dict.fromkeys(FIRST)
    for _, _, judged in runs:
        names.update(dict.fromkeys(sorted(judged.run.metrics)))
    measured = [name for name in names if any(_measured(judged, name) for _, _, judged in runs)]
    return {
        "metrics": [
            {
                "name": name,
                "title": title(name),
                "unit": unit(name),
                "group": _group(name),
            }
            for name in measured
        ],
        "reference": report.comparison.reference if report.comparison else None,
        "candidate": report.comparison.candidate if report.comparison else None,
        "runs": [
            {
                "label": run_title,
                "side": label,
                "every": _stride(judged),
                "num_ranks": len(judged.run.ranks),
                "num_warmup": -(-judged.num_warmup // _stride(judged)),
                "steps": judged.run.global_step[:: _stride(judged)].tolist(),
                "values": {
                    name: _over_ranks(judged.run.metrics[name][:, :: _stride(judged)])
                    for name in measured
                    if _measured(judged, name)
                },
            }
            for run_title, label, judged in runs
        ],
    }


def _group(name: str) -> str:
    """The heading under which a list of metrics has it."""
    kind, op = metric_key(name)
    if name in FIRST:
        return "The step and its parts"
    if kind in MEASURES or kind in COUNTED:
        return "Work, memory and telemetry"
    return op if op else "More of the step"


def _place(name: str) -> int:
    return FIRST.index(name) if name in FIRST else len(FIRST)


def _measured(judged: JudgedRun, name: str) -> bool:
    values = judged.run.metrics.get(name)
    return values is not None and bool(np.isfinite(values).any())


def _stride(judged: JudgedRun) -> int:
    """Rows apart of the steps that are shown: not in time with --overhead, which could leave out
    all steps that were timed."""
    least = max(1, -(-judged.run.num_steps // MAX_STEPS))
    is_timed: NDArray[np.bool_] = np.logical_or.reduce(np.isfinite(judged.run.metrics["compute_ms"]), axis=0)
    fair = (
        interval
        for interval in range(least, 2 * least + 1)
        if 2 * is_timed[::interval].mean() >= is_timed.mean()
    )
    return next(fair, least)


def _over_ranks(values: NDArray[np.float64]) -> list[list[float | None]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a step that no rank measured gives NaN, wanted here
        rows = [np.nanmedian(values, axis=0), np.nanmin(values, axis=0), np.nanmax(values, axis=0)]
    if len(values) == 1:
        rows = rows[:1]
    return [[float(f"{x:.5g}") if np.isfinite(x) else None for x in row.tolist()] for row in rows]


def static_picture(data: dict[str, Any]) -> Markup | None:
    """The first metric as a picture that needs no script: what is printed before the chart was looked at."""
    if not data["metrics"]:
        return None
    metric = data["metrics"][0]
    runs = [run for run in data["runs"] if metric["name"] in run["values"]]
    judged = [x for run in runs for row in run["values"][metric["name"]] for x in row[run["num_warmup"] :]]
    present: list[float] = [x for x in judged if x is not None]
    if not present:
        return None
    low, high = min(present), max(present)
    room = 0.08 * ((high - low) or abs(high) or 1.0)
    low, high = low - room, high + room
    first: int = min(run["steps"][0] for run in runs)
    last: int = max(max(run["steps"][-1] for run in runs), first + 1)

    def x_of(step: int) -> float:
        return round(60 + 640 * (step - first) / (last - first), 1)

    def y_of(value: float) -> float:
        return round(280 - 250 * (min(max(value, low), high) - low) / (high - low), 1)

    def points(steps: Iterable[int], values: Iterable[float | None]) -> list[str]:
        return [f"{x_of(s)},{y_of(x)}" for s, x in zip(steps, values, strict=True) if x is not None]

    drawn: list[Markup] = [
        tag("path", d="M60,30 V280 H700 M760,280 H990", class_="axis line"),
        tag("text", f"{number(high)} {metric['unit']}", x=2, y=26),
        tag("text", f"{number(low)} {metric['unit']}", x=2, y=296),
        tag("text", f"global step {first} to {last}", x=380, y=298, text_anchor="middle"),
    ]
    for place, run in enumerate(runs):
        side = 1 if len(runs) == 1 or run["side"] == data["candidate"] else 0
        middle, *spread = run["values"][metric["name"]]
        steps = run["steps"]
        if spread:
            least, greatest = spread
            outline = points(steps, greatest) + points(steps, least)[::-1]
            drawn.append(tag("polygon", points=" ".join(outline), class_=f"band run-{side}"))
        drawn.append(tag("polyline", points=" ".join(points(steps, middle)), class_=f"line run-{side}"))
        drawn += _box(middle[run["num_warmup"] :], place, len(runs), run["label"], y_of, side)
    return tag("svg", drawn, viewBox="0 0 1000 300", class_="still", aria_hidden="true")


def _box(
    values: list[float | None],
    place: int,
    num_runs: int,
    label: str,
    y_of: Callable[[float], float],
    side: int,
) -> list[Markup]:
    """Quartiles of the judged steps, and their median."""
    present = [x for x in values if x is not None]
    if not present:
        return []
    lower, middle, upper = map(y_of, np.percentile(present, (25, 50, 75)).tolist())
    width = 200 / num_runs
    x = 770 + place * width
    return [
        tag("rect", x=f"{x:.1f}", y=f"{upper:.1f}", width=f"{0.6 * width:.1f}",
            height=f"{max(1.0, lower - upper):.1f}", class_=f"box run-{side}"),
        tag("path", d=f"M{x:.1f},{middle:.1f} h{0.6 * width:.1f}", class_=f"line run-{side}"),
        tag("text", label[:14], x=f"{x:.1f}", y=296),
    ]  # fmt: skip


@cache
def plotly_source() -> str:
    """The plotting library as the installed package brings it."""
    return resources.files("plotly").joinpath("package_data", "plotly.min.js").read_text(encoding="utf-8")


@cache
def plotly_packed() -> str:
    """gzip, base64: 1.9 MB in the page instead of 4.8, and nothing to parse until a chart is looked at."""
    return base64.b64encode(gzip.compress(plotly_source().encode(), 9, mtime=0)).decode()
