"""The page's section "Distributions": every metric over steps, drawn by distributions.js."""

import base64
import gzip
import warnings
from functools import cache
from importlib import resources
from typing import Any

import numpy as np

from aorta.account.metrics import COUNTED, MEASURES, metric_key
from aorta.account.model import Report, Run
from aorta.page.parts import title, unit
from aorta.timeline.arrays import Flags, Floats

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
        names.update(dict.fromkeys(sorted(judged.metrics)))
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
                "num_ranks": len(judged.ranks),
                "num_warmup": -(-judged.num_warmup // _stride(judged)),
                "steps": judged.global_step[:: _stride(judged)].tolist(),
                "values": {
                    name: _over_ranks(judged.metrics[name][:, :: _stride(judged)])
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


def _measured(judged: Run, name: str) -> bool:
    values = judged.metrics.get(name)
    return values is not None and bool(np.isfinite(values).any())


def _stride(judged: Run) -> int:
    """Rows apart of the steps that are shown: not in time with --overhead, which could leave out
    all steps that were timed."""
    least = max(1, -(-judged.num_steps // MAX_STEPS))
    is_timed: Flags = np.logical_or.reduce(np.isfinite(judged.metrics["compute_ms"]), axis=0)
    fair = (
        interval
        for interval in range(least, 2 * least + 1)
        if 2 * is_timed[::interval].mean() >= is_timed.mean()
    )
    return next(fair, least)


def _over_ranks(values: Floats) -> list[list[float | None]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a step that no rank measured gives NaN, wanted here
        rows = [np.nanmedian(values, axis=0), np.nanmin(values, axis=0), np.nanmax(values, axis=0)]
    if len(values) == 1:
        rows = rows[:1]
    return [[float(f"{x:.5g}") if np.isfinite(x) else None for x in row.tolist()] for row in rows]


@cache
def plotly_source() -> str:
    """The plotting library as the installed package brings it."""
    return resources.files("plotly").joinpath("package_data", "plotly.min.js").read_text(encoding="utf-8")


@cache
def plotly_packed() -> str:
    """gzip, base64: 1.9 MB in the page instead of 4.8, and nothing to parse until a chart is looked at."""
    return base64.b64encode(gzip.compress(plotly_source().encode(), 9, mtime=0)).decode()
