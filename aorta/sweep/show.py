"""The table and the picture of a sweep: trials by their objective, the best first."""

from pathlib import Path

from rich.markup import escape
from rich.table import Table

from aorta.hw_queue_eval.core.results import Metric, Point
from aorta.sweep.spec import SweepSpec

MOST_ROWS = 40


def ranked(spec: SweepSpec, points: list[Point]) -> list[Point]:
    """Measured trials, the best first."""
    measured = [point for point in points if point.status == "measured"]
    return sorted(measured, key=lambda point: _value(spec, point), reverse=spec.maximizes())


def answer(spec: SweepSpec, points: list[Point]) -> str:
    """One line: the best trial, and whether the next one is worse beyond noise."""
    order = ranked(spec, points)
    if not order:
        return "no trial was measured"
    best = order[0]
    text = f"best {spec.objective} {quantity(best.metrics[spec.objective])}: {described(best)}"
    same = [p for p in order[1:] if _overlaps(best.metrics[spec.objective], p.metrics[spec.objective])]
    if same:
        text += f"; within its noise: {len(same)} of {len(order) - 1} others"
    return text


def table(spec: SweepSpec, points: list[Point]) -> Table:
    names = list(spec.choices())
    shown = Table(box=None, pad_edge=False, header_style="bold")
    shown.add_column(spec.objective, justify="right")
    shown.add_column("95 %")
    for name in names:
        shown.add_column(name, justify="right")
    order = ranked(spec, points)
    for point in order[:MOST_ROWS]:
        found = point.metrics[spec.objective]
        shown.add_row(quantity(found), _interval(found), *(_cell(point, name) for name in names))
    if len(order) > MOST_ROWS:
        shown.add_row("...", f"{len(order) - MOST_ROWS} more")
    for point in (point for point in points if point.status != "measured"):
        shown.add_row("failed", escape(point.reason or ""), *(_cell(point, name) for name in names))
    return shown


def draw(spec: SweepSpec, points: list[Point], path: Path) -> Path:
    """PNG: every trial's objective with its interval, the best on top."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    order = ranked(spec, points)[:MOST_ROWS]
    figure = Figure(figsize=(9, max(2.0, 0.26 * len(order) + 1.2)), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    for place, point in enumerate(order):
        found = point.metrics[spec.objective]
        if found.interval is not None and found.interval.low is not None and found.interval.high is not None:
            axis.plot([found.interval.low, found.interval.high], [place, place], color="#4477aa", linewidth=2)
        axis.plot([_value(spec, point)], [place], "o", color="#4477aa", markersize=5)
    if order:
        axis.axvline(_value(spec, order[0]), color="#000000", alpha=0.3, linewidth=0.8)
    axis.set_yticks(range(len(order)), [described(point) for point in order], fontsize=8)
    axis.invert_yaxis()
    unit = order[0].metrics[spec.objective].unit if order else ""
    axis.set_xlabel(f"{spec.objective}{f', {unit}' if unit else ''}: median over steps, 95 %")
    axis.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")
    return path


def described(point: Point) -> str:
    return "  ".join(
        f"{name.rpartition('.')[2]}={_text(value)}" for name, value in point.configuration.items()
    )


def quantity(metric: Metric) -> str:
    if metric.value is None:
        return "n/a"
    return f"{metric.value:.4g}{' ' + metric.unit if metric.unit else ''}"


def _interval(metric: Metric) -> str:
    if metric.interval is None or metric.interval.low is None or metric.interval.high is None:
        return "n/a"
    return f"{metric.interval.low:.4g} to {metric.interval.high:.4g}"


def _overlaps(one: Metric, other: Metric) -> bool:
    """Without intervals nothing tells them apart."""
    if one.interval is None or other.interval is None:
        return True
    low = max(one.interval.low or 0.0, other.interval.low or 0.0)
    high = [i.high for i in (one.interval, other.interval) if i.high is not None]
    return len(high) < 2 or low <= min(high)


def _value(spec: SweepSpec, point: Point) -> float:
    value = point.metrics[spec.objective].value
    assert value is not None
    return value


def _cell(point: Point, name: str) -> str:
    return escape(_text(point.configuration.get(name)))


def _text(value: object) -> str:
    return "unset" if value is None else str(value)
