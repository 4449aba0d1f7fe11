"""Pictures, PNG: a sweep over its stream counts, and a comparison of two results."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aorta.account.results.compare import Compared, ResultComparison
from aorta.account.results.schema import (
    Document,
    Metric,
    Point,
    Scaling,
    Value,
    check_output,
    streams_of,
    without_streams,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes


BLUE, ORANGE, GREY, GREEN = "#2166ac", "#d6604d", "#888888", "#4d9221"
COLOURS = {"regression": "#d6604d", "no regression": "#4d9221", "cannot tell": "#c7a008"}
MAX_ROWS = 60


def draw(document: Document, folder: Path, overwrite: bool = False) -> list[Path]:
    """One picture for each scaling of the document; the files that were written.

    RecordError where one is there already.
    """
    named = [(picture_path(folder, row.workload), row) for row in document.scaling]
    for path, _ in named:
        check_output(path, overwrite)
    folder.mkdir(parents=True, exist_ok=True)
    for path, scaling in named:
        _save(path, scaling, _points(document, scaling))
    return [path for path, _ in named]


def picture_path(folder: Path, workload: str) -> Path:
    """Path of the picture of a workload's scaling."""
    return folder / f"{workload}_scaling.png"


def _points(document: Document, scaling: Scaling) -> list[Point]:
    """Points of the scaling, in its order."""
    points = {
        point.configuration["streams"]: point
        for point in document.points
        if point.metrics and without_streams(point.configuration) == scaling.configuration
    }
    return [points[count] for count in scaling.streams]


def _save(path: Path, scaling: Scaling, points: Sequence[Point]) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4.2), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, 3)
    _throughput(axes[0], scaling, points)
    _efficiency(axes[1], scaling)
    _latency(axes[2], points)
    for axis in axes:
        _over_streams(axis, scaling.streams)
    c = scaling.configuration
    figure.suptitle(
        f"{scaling.workload}   {c['sync_mode']}   {c['world_size']} x {c['device']}   size {c['size']}"
        f"   source: {points[0].source}",
        x=0.01, ha="left", fontsize=11, fontweight="bold",
    )  # fmt: skip
    figure.savefig(path)


def _over_streams(axis: "Axes", streams: Sequence[int]) -> None:
    axis.set_xscale("log", base=2)
    axis.set_xticks(list(streams), [str(count) for count in streams])
    axis.minorticks_off()
    axis.set_xlabel("streams")
    axis.set_ylim(0, axis.get_ylim()[1])
    axis.grid(axis="y", color="#000000", alpha=0.12, linewidth=0.6)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=8, loc="best")


def _throughput(axis: "Axes", scaling: Scaling, points: Sequence[Point]) -> None:
    metrics = [point.metrics["units_per_s"] for point in points]
    _with_interval(axis, scaling.streams, metrics, BLUE, "measured, 95 %")
    if all(bound is not None for bound in scaling.bound):
        bound = [scaling.throughput[0] * share for share in _numbers(scaling.bound)]
        axis.plot(scaling.streams, bound, color=GREY, linestyle="--", linewidth=1.2,
                  label="if pieces did not slow each other")  # fmt: skip
    axis.axvline(scaling.knee, color=ORANGE, linewidth=1.2, label=f"knee: {scaling.knee}")
    if scaling.knee_interval is not None and scaling.knee_interval[0] < scaling.knee_interval[1]:
        axis.axvspan(*scaling.knee_interval, color=ORANGE, alpha=0.15, linewidth=0)
    axis.set_ylabel(scaling.unit)
    axis.set_title("throughput", loc="left", fontsize=10)


def _efficiency(axis: "Axes", scaling: Scaling) -> None:
    axis.plot(scaling.streams, scaling.efficiency, "o-", color=BLUE, label="speed-up per stream")
    of_bound = [
        None if bound is None else speedup / bound
        for speedup, bound in zip(scaling.speedup, scaling.bound, strict=True)
    ]
    if all(value is not None for value in of_bound):
        axis.plot(scaling.streams, _numbers(of_bound), "s--", color=GREY,
                  label="speed-up over its bound")  # fmt: skip
    if all(value is not None for value in scaling.device_bound):
        axis.plot(scaling.streams, _numbers(scaling.device_bound), "^:", color=GREEN,
                  label="of the device's peak")  # fmt: skip
    axis.axhline(1, color="#000000", alpha=0.3, linewidth=0.8)
    axis.set_ylim(top=1.15 * max(1.0, *scaling.efficiency))
    axis.set_title(f"efficiency against {scaling.baseline_streams} stream(s)", loc="left", fontsize=10)


def _latency(axis: "Axes", points: Sequence[Point]) -> None:
    streams = [streams_of(point.configuration) for point in points]
    for name, colour in (("p50", BLUE), ("p95", GREY), ("p99", ORANGE)):
        _with_interval(axis, streams, [point.metrics[f"latency_{name}_ms"] for point in points], colour, name)
    axis.set_ylabel("ms per iteration")
    axis.set_title("latency (open end: too few iterations to bound it)", loc="left", fontsize=10)


def _with_interval(
    axis: "Axes", streams: Sequence[int], metrics: Sequence[Metric], colour: str, label: str
) -> None:
    values = [metric.value or 0.0 for metric in metrics]
    axis.plot(streams, values, "o-", color=colour, label=label, markersize=4)
    lows, highs = [], []
    for metric, value in zip(metrics, values, strict=True):
        low = metric.interval.low if metric.interval else None
        high = metric.interval.high if metric.interval else None
        lows.append(value - low if low is not None else 0.0)
        highs.append(high - value if high is not None else 0.0)
    axis.errorbar(streams, values, yerr=[_positive(lows), _positive(highs)], fmt="none", ecolor=colour,
                  capsize=3, linewidth=1)  # fmt: skip


def _positive(values: Sequence[float]) -> list[float]:
    return [max(value, 0.0) for value in values]


def _numbers(values: Sequence[Any]) -> list[float]:
    return [float(value) for value in values]


def draw_comparison(comparison: ResultComparison, path: Path, overwrite: bool = False) -> Path:
    """The picture's path. RecordError where it is taken."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    check_output(path, overwrite)
    rows = [row for row in comparison.rows if row.ratio is not None and row.verdict in COLOURS][:MAX_ROWS]
    sweeps = _sweeps(comparison.rows)
    height = max(3.0, 0.24 * len(rows) + 1.4)
    figure = Figure(figsize=(13 if sweeps else 8, height), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, 2 if sweeps else 1, squeeze=False)[0]
    _ratios(axes[0], rows, comparison.threshold)
    if sweeps:
        _both_throughputs(axes[1], sweeps)
    figure.suptitle(f"test against baseline: {comparison.verdict}", x=0.01, ha="left", fontweight="bold")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")
    return path


def _ratios(axis: "Axes", rows: list[Compared], threshold: float) -> None:
    labels = [f"{_row_label(row.configuration)}  {row.metric}" for row in rows]
    axis.axvspan(1 - threshold, 1 + threshold, color="#000000", alpha=0.07, linewidth=0)
    axis.axvline(1, color="#000000", alpha=0.4, linewidth=0.8)
    for place, row in enumerate(rows):
        assert row.ratio is not None
        low, high = (row.interval.low, row.interval.high) if row.interval else (None, None)
        if low is not None and high is not None and low <= row.ratio <= high:
            axis.plot([low, high], [place, place], color=COLOURS[row.verdict], linewidth=2)
        axis.plot([row.ratio], [place], "o", color=COLOURS[row.verdict], markersize=5)
    for verdict, colour in COLOURS.items():
        if any(row.verdict == verdict for row in rows):
            axis.plot([], [], "o-", color=colour, label=verdict)
    axis.set_yticks(range(len(rows)), labels, fontsize=8)
    axis.invert_yaxis()
    axis.set_xlabel("test / baseline, 95 %")
    axis.spines[["top", "right"]].set_visible(False)
    if rows:
        axis.legend(frameon=False, fontsize=8)


def _sweeps(rows: list[Compared]) -> dict[str, list[Compared]]:
    """Throughput rows of workloads that were compared at two stream counts or more."""
    rows_of: dict[str, list[Compared]] = {}
    for row in rows:
        if row.metric == "units_per_s" and isinstance(row.configuration.get("streams"), int):
            rows_of.setdefault(str(row.configuration["workload"]), []).append(row)
    return {
        name: sorted(workload_rows, key=lambda row: streams_of(row.configuration))
        for name, workload_rows in rows_of.items()
        if len(workload_rows) > 1
    }


def _both_throughputs(axis: "Axes", sweeps: dict[str, list[Compared]]) -> None:
    """Draws each workload over its own best baseline, so that units do not matter."""
    counts: set[int] = set()
    for number, (name, rows) in enumerate(sweeps.items()):
        best = max(row.baseline or 0.0 for row in rows) or 1.0
        streams = [streams_of(row.configuration) for row in rows]
        counts.update(streams)
        colour = f"C{number}"
        axis.plot(streams, [(row.baseline or 0.0) / best for row in rows], "o--", color=colour, alpha=0.6,
                  label=f"{name}: baseline")  # fmt: skip
        axis.plot(streams, [(row.test or 0.0) / best for row in rows], "s-", color=colour, label="test")
    axis.set_ylabel("throughput, best baseline = 1")
    _over_streams(axis, sorted(counts))


def _row_label(configuration: dict[str, Value]) -> str:
    if "workload" in configuration:
        return f"{configuration['workload']} {configuration.get('streams', '')}".rstrip()
    return " ".join(f"{name}={value}" for name, value in configuration.items())[:60]
