"""Tables on the terminal."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from aorta.hw_queue_eval.core.results import Document, Metric, Point
from aorta.hw_queue_eval.options import fields
from aorta.hw_queue_eval.workload import Workload


def show_list(chosen: Sequence[type[Workload]], verbose: bool) -> None:
    table = Table(box=None, pad_edge=False)
    for name in ("workload", "category", "priority", "streams", "unit", "question"):
        table.add_column(name, overflow="fold")
    for one in chosen:
        question = one.question
        if verbose:
            flags = " ".join(field.flag for field in fields(one.Options).values())
            question += f"\nstreams: {one.stream_meaning}" + (f"\noptions: {flags}" if flags else "")
        table.add_row(
            one.name, one.category, one.priority, f"{one.min_streams}-{one.max_streams}", one.unit, question
        )
    Console().print(table)


def show_run(found: Document, output: Path | None) -> None:
    console = Console(highlight=False)
    point = found.points[0]
    console.print(f"{heading(point)}", markup=False)
    table = Table(box=None, pad_edge=False)
    for name in ("metric", "value", "95 %"):
        table.add_column(name, justify="left" if name == "metric" else "right")
    for name, metric in point.metrics.items():
        table.add_row(name, number(metric), interval(metric))
    console.print(table)
    if output is not None:
        console.print(f"wrote {output}", markup=False)


def heading(point: Point) -> str:
    c = point.configuration
    return f"{c['workload']}   {c['streams']} streams   {c['sync_mode']}   {c['device']}"


def number(metric: Metric) -> str:
    return f"n/a ({metric.reason})" if metric.value is None else f"{metric.value:.4g} {metric.unit}"


def interval(metric: Metric) -> str:
    if metric.interval is None:
        return ""
    low, high = metric.interval.low, metric.interval.high
    return f"[{'?' if low is None else f'{low:.4g}'}, {'?' if high is None else f'{high:.4g}'}]"


def show_sweep(found: Document, output: Path | None, pictures: Sequence[Path]) -> None:
    for point in found.points:
        Console().print(heading(point))
