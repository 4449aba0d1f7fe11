"""Results on the terminal: what was measured, numbers with their spread, what to know, files last."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from aorta.account.results.schema import Document, Metric, Point, Scaling, Setting

LONGEST_TITLE = 11
"""Characters of a column's title that leave room for the others on a terminal of 80 columns."""
_BYTES = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def show_run(result: Document, output: Path | None) -> None:
    """One point: heading, verdict of the check, metrics, ranks, notes."""
    console = _console()
    point = result.points[0]
    console.print(heading(point, result.setting), markup=False, style="bold", soft_wrap=True)
    console.print(_checked(point), soft_wrap=True)
    if point.metrics:
        console.print(_metrics(point))
        for line in _missing(point):
            console.print(line, markup=False, style="dim", soft_wrap=True)
    if len(point.ranks) > 1:
        console.print(_ranks(point))
        if point.skew_ms is not None:
            console.print(f"slowest - fastest rank: {number(point.skew_ms)} {interval(point.skew_ms)}")
    for line in _power(point):
        console.print(line, markup=False)
    _footer(console, point.notes, result.setting, output)


def show_sweep(result: Document, output: Path | None) -> None:
    """A table for each workload with its knee; points that were skipped or failed are rows too."""
    console = _console()
    names = dict.fromkeys(str(point.configuration["workload"]) for point in result.points)
    for name in names:
        points = [point for point in result.points if point.configuration["workload"] == name]
        scaling = next((candidate for candidate in result.scaling if candidate.workload == name), None)
        measured = next((point for point in points if point.status == "measured"), points[0])
        console.print(
            heading(measured, result.setting, with_streams=False), markup=False, style="bold", soft_wrap=True
        )
        console.print(_sweep(points, scaling))
        if scaling is not None:
            console.print(_knee(scaling), markup=False, soft_wrap=True)
            for line in questions(points, scaling):
                console.print(f"  {line}", markup=False, style="yellow", soft_wrap=True)
        for note in dict.fromkeys(note for point in points for note in (*_reasons(point), *point.notes)):
            console.print(f"  {note}", markup=False, style="yellow", soft_wrap=True)
        console.print()
    _footer(console, [], result.setting, output)


def heading(point: Point, setting: Setting, with_streams: bool = True) -> str:
    """Workload, settings and device of a document, in one line."""
    c = point.configuration
    device = str(setting.devices[0].get("name")) if setting.devices and c["device"] != "cpu" else "cpu"
    parts = [str(c["workload"])]
    parts += [f"{c['streams']} streams"] if with_streams else []
    parts += [str(c["sync_mode"]), f"{c['world_size']} x {device}", f"size {c['size']}"]
    if point.collectives != "none":
        parts.append(f"collectives {point.collectives}")
    if point.source:
        parts.append(f"source: {point.source}")
    return "   ".join(parts)


def _console() -> Console:
    return Console(highlight=False)


def _checked(point: Point) -> str:
    if point.status != "measured":
        return f"[red]{point.status}: {escape(point.reason or '')}[/red]"
    details = dict.fromkeys(run.check.detail for run in point.ranks)
    return f"results are correct: {escape('; '.join(details))}"


def _metrics(point: Point) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("metric", no_wrap=True)
    table.add_column("value", justify="right", no_wrap=True)
    table.add_column("unit", overflow="fold")
    table.add_column("95 %", justify="right", no_wrap=True)
    sources: dict[str, list[str]] = {}
    for name, metric in point.metrics.items():
        value, _, unit = number(metric).partition(" ")
        table.add_row(name, value, escape(unit), interval(metric))
        if metric.value is not None and metric.source is not None:
            sources.setdefault(metric.source, []).append(name)
    if sources:
        table.caption_justify = "left"
        table.caption = "\n".join(
            escape(f"{', '.join(names) if len(names) < 3 else f'{names[0]} … {names[-1]}'}: {source}")
            for source, names in sources.items()
        )
    return table


def _missing(point: Point) -> list[str]:
    """Reasons for missing numbers or intervals, one line for each."""
    names: dict[str, list[str]] = {}
    for name, metric in point.metrics.items():
        if metric.reason and metric.value is None:
            names.setdefault(f"n/a: {metric.reason}", []).append(name)
        elif metric.reason and metric.interval is None:
            names.setdefault(metric.reason, []).append(name)
    return [f"{reason}   ({', '.join(places)})" for reason, places in names.items()]


def _ranks(point: Point) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("rank", "device ms", "enqueue ms", "launch-bound", "check"):
        table.add_column(name, justify="left" if name == "check" else "right")
    for run in point.ranks:
        table.add_row(
            str(run.rank),
            f"{run.device_ms / len(run.iteration_ms):.4g}",
            f"{sum(run.enqueue_ms) / len(run.enqueue_ms):.4g}",
            "yes" if run.launch_bound else "no",
            "ok" if run.check.ok else "[red]wrong[/red]",
        )
    return table


def _power(point: Point) -> list[str]:
    """Clocks and power of every rank's device, as they were at the end of the timed iterations."""
    lines = []
    for run in point.ranks:
        if run.telemetry is None:
            continue
        telemetry = run.telemetry
        parts = [f"{telemetry.power_w:.0f} W"] if telemetry.power_w is not None else []
        parts += [f"{telemetry.sm_clock_mhz:.0f} MHz"] if telemetry.sm_clock_mhz is not None else []
        parts += [f"{telemetry.temperature_c:.0f} C"] if telemetry.temperature_c is not None else []
        parts += [f"clock held by {', '.join(telemetry.throttling)}"] if telemetry.throttling else []
        lines.append(f"rank {run.rank}: {', '.join(parts)}")
    return lines


def _sweep(points: Sequence[Point], scaling: Scaling | None) -> Table:
    table = Table(box=None, pad_edge=False)
    unit = next((p.metrics["units_per_s"].unit for p in points if p.metrics), "units/s")
    rate_title = unit
    if len(unit) > LONGEST_TITLE:
        rate_title = "rate"
        table.caption, table.caption_justify = f"rate: {unit}", "left"
    for name in (
        "streams",
        rate_title,
        "± 95 %",
        "speed-up",
        "bound",
        "effic.",
        "p50 ms",
        "p99 ms",
        "at once",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for point in points:
        streams = str(point.configuration["streams"])
        if not point.metrics:
            table.add_row(streams, point.status, style="yellow")
            continue
        rate = point.metrics["units_per_s"]
        place = scaling.streams.index(int(streams)) if scaling and int(streams) in scaling.streams else None
        table.add_row(
            streams,
            plain(rate.value),
            _half_width(rate),
            plain(scaling.speedup[place]) if scaling and place is not None else "",
            plain(scaling.bound[place], digits=3) if scaling and place is not None else "",
            plain(scaling.efficiency[place], digits=2) if scaling and place is not None else "",
            plain(point.metrics["latency_p50_ms"].value, digits=3),
            plain(point.metrics["latency_p99_ms"].value, digits=3),
            plain(point.metrics["achieved_concurrency"].value, digits=3),
            style="red" if point.status == "failed" else "",
        )
    return table


def _reasons(point: Point) -> list[str]:
    """Reasons why a point has no numbers, or wrong ones."""
    if point.status == "measured":
        return []
    return [f"{point.configuration['streams']} streams {point.status}: {point.reason}"]


def _half_width(metric: Metric) -> str:
    if metric.interval is None or not metric.value:
        return ""
    low, high = metric.interval.low, metric.interval.high
    return "" if low is None or high is None else f"{plain(50 * (high - low) / metric.value, digits=2)} %"


def _knee(scaling: Scaling) -> str:
    span = ""
    if scaling.knee_interval is not None:
        span = f" [{scaling.knee_interval[0]}, {scaling.knee_interval[1]}]"
    elif scaling.knee_reason:
        span = f" (no interval: {scaling.knee_reason})"
    base = "" if scaling.baseline_streams == 1 else f"; speed-up is over {scaling.baseline_streams} streams"
    return (
        f"  95 % of the best throughput from {scaling.knee} streams{span}; the same work at every point{base}"
    )


def questions(points: Sequence[Point], scaling: Scaling) -> list[str]:
    """What to make of a speed-up above its bound, for each kind: the bound is what placement alone allows."""
    rate_of = {
        point.configuration["streams"]: point.metrics["units_per_s"] for point in points if point.metrics
    }
    first = rate_of.get(scaling.baseline_streams)
    above: dict[str, list[str]] = {}
    for count, speedup, bound in zip(scaling.streams, scaling.speedup, scaling.bound, strict=True):
        if bound is None or speedup <= bound:
            continue
        least = _least_ratio(rate_of.get(count), first)
        if least is None:
            why = "no interval tells it from scatter"
        elif least <= bound:
            why = "within the scatter of the rates"
        else:
            why = (
                f"beyond the scatter: at {scaling.baseline_streams} streams more than the placement of work"
                " held it up (launches, waiting, a clock); compare with more streams"
            )
        above.setdefault(why, []).append(str(count))
    return [
        f"speed-up above its bound at {', '.join(counts)} streams: {why}" for why, counts in above.items()
    ]


def _least_ratio(rate: Metric | None, first: Metric | None) -> float | None:
    """Low end of a rate over the first one's high end; None where either is not bounded."""
    if rate is None or first is None or rate.interval is None or first.interval is None:
        return None
    low, high = rate.interval.low, first.interval.high
    return None if low is None or not high else low / high


def _footer(console: Console, notes: Sequence[str], setting: Setting, output: Path | None) -> None:
    console.print(f"queues: {setting.queues}", markup=False)
    for note in [*notes, *setting.warnings]:
        console.print(note, markup=False, style="yellow", soft_wrap=True)
    if output is not None:
        console.print(f"wrote {output}", markup=False, soft_wrap=True)


def number(metric: Metric) -> str:
    """A metric with its unit; n/a where it was not measured."""
    if metric.value is None:
        return "n/a"
    if metric.unit == "bytes":
        return _bytes(metric.value)
    return f"{plain(metric.value)} {metric.unit}".rstrip()


def interval(metric: Metric) -> str:
    """[low, high]; a side that the iterations do not bound is a question mark."""
    if metric.interval is None:
        return ""
    low, high = metric.interval.low, metric.interval.high
    return f"\\[{plain(low, '?')}, {plain(high, '?')}]"


def _bytes(value: float) -> str:
    for unit, size in _BYTES:
        if value >= size:
            return f"{value / size:.2f} {unit}"
    return f"{value:.0f} bytes"


def plain(value: Any, missing: str = "", digits: int = 4) -> str:
    """A number of so many digits, without an exponent for large ones."""
    if value is None:
        return missing
    return f"{value:.0f}" if abs(value) >= 10**digits else f"{value:.{digits}g}"
