"""A picture of a comparison, PNG: ratios with their intervals, and throughput of both sides."""

from pathlib import Path
from typing import TYPE_CHECKING

from aorta.results.compare import Compared, Comparison
from aorta.results.schema import Value, check_output, streams_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {"regression": "#d6604d", "no regression": "#4d9221", "cannot tell": "#c7a008"}
MAX_ROWS = 60


def draw_comparison(comparison: Comparison, path: Path, overwrite: bool = False) -> Path:
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
        _throughput(axes[1], sweeps)
    figure.suptitle(f"test against baseline: {comparison.verdict}", x=0.01, ha="left", fontweight="bold")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")
    return path


def _ratios(axis: "Axes", rows: list[Compared], threshold: float) -> None:
    labels = [f"{_label(row.configuration)}  {row.metric}" for row in rows]
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
        name: sorted(some, key=lambda row: streams_of(row.configuration))
        for name, some in rows_of.items()
        if len(some) > 1
    }


def _throughput(axis: "Axes", sweeps: dict[str, list[Compared]]) -> None:
    """Each workload over its own best baseline, so that units do not matter."""
    counts: set[int] = set()
    for number, (name, rows) in enumerate(sweeps.items()):
        best = max(row.baseline or 0.0 for row in rows) or 1.0
        streams = [streams_of(row.configuration) for row in rows]
        counts.update(streams)
        colour = f"C{number}"
        axis.plot(streams, [(row.baseline or 0.0) / best for row in rows], "o--", color=colour, alpha=0.6,
                  label=f"{name}: baseline")  # fmt: skip
        axis.plot(streams, [(row.test or 0.0) / best for row in rows], "s-", color=colour, label="test")
    axis.set_xscale("log", base=2)
    axis.set_xticks(sorted(counts), [str(count) for count in sorted(counts)])
    axis.minorticks_off()
    axis.set_xlabel("streams")
    axis.set_ylabel("throughput, best baseline = 1")
    axis.set_ylim(0, axis.get_ylim()[1])
    axis.grid(axis="y", color="#000000", alpha=0.12, linewidth=0.6)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=8)


def _label(configuration: dict[str, Value]) -> str:
    if "workload" in configuration:
        return f"{configuration['workload']} {configuration.get('streams', '')}".rstrip()
    return " ".join(f"{name}={value}" for name, value in configuration.items())[:60]
