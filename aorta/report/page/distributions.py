"""Every metric over the steps of every run: what the distribution charts draw."""

import base64
import gzip
import warnings
from functools import cache
from importlib import resources
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aorta.report.leading import LED, is_raw_part, plain, with_word
from aorta.report.model import JudgedRun, Report
from aorta.report.page.words import title, unit

MAX_STEPS = 500
"""Of a longer run every second, third, ... step is shown."""
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
    known = [name for name in names if any(_measured(judged, name) for _, _, judged in runs)]
    has_both = any(dataset.lead == "calibrated" for dataset in report.datasets.values())
    if has_both:  # what leads comes first
        known.sort(key=lambda name: _place(plain(name)) - 0.5 * name.startswith("calibrated."))
    return {
        "metrics": [
            {"name": name, "title": with_word(title(name), _word(name, has_both)), "unit": unit(name)}
            for name in known
        ],
        "reference": report.comparison.reference if report.comparison else None,
        "candidate": report.comparison.candidate if report.comparison else None,
        "runs": [
            {
                "label": shown,
                "side": label,
                "every": _every(judged),
                "num_ranks": len(judged.run.ranks),
                "num_warmup": -(-judged.num_warmup // _every(judged)),
                "steps": judged.run.global_step[:: _every(judged)].tolist(),
                "values": {
                    name: _over_ranks(judged.run.metrics[name][:, :: _every(judged)])
                    for name in known
                    if _measured(judged, name)
                },
            }
            for shown, label, judged in runs
        ],
    }


@cache
def plotly_source() -> str:
    """The plotting library as the installed package brings it."""
    return resources.files("plotly").joinpath("package_data", "plotly.min.js").read_text(encoding="utf-8")


@cache
def plotly_packed() -> str:
    """gzip, base64: 1.9 MB in the page instead of 4.8, and nothing to parse until a chart is looked at."""
    return base64.b64encode(gzip.compress(plotly_source().encode(), 9, mtime=0)).decode()


def _place(name: str) -> int:
    return FIRST.index(name) if name in FIRST else len(FIRST)


def _word(name: str, has_both: bool) -> str:
    return "raw" if has_both and (name in LED["calibrated"] or is_raw_part(name)) else ""


def _measured(judged: JudgedRun, name: str) -> bool:
    values = judged.run.metrics.get(name)
    return values is not None and bool(np.isfinite(values).any())


def _every(judged: JudgedRun) -> int:
    """Rows apart of the steps that are shown: not in time with recording.timed_every, which could leave out
    all steps that were timed."""
    least = max(1, -(-judged.run.num_steps // MAX_STEPS))
    is_timed: NDArray[np.bool_] = np.logical_or.reduce(np.isfinite(judged.run.metrics["compute_ms"]), axis=0)
    fair = (every for every in range(least, 2 * least + 1) if 2 * is_timed[::every].mean() >= is_timed.mean())
    return next(fair, least)


def _over_ranks(values: NDArray[np.float64]) -> list[list[float | None]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a step that no rank measured gives NaN, wanted here
        rows = [np.nanmedian(values, axis=0), np.nanmin(values, axis=0), np.nanmax(values, axis=0)]
    if len(values) == 1:
        rows = rows[:1]
    return [[float(f"{x:.5g}") if np.isfinite(x) else None for x in row.tolist()] for row in rows]
