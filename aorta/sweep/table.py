"""The answer of a matrix as text: one table with a row for each cell, then what is to know of it."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from aorta.account import numbers
from aorta.sweep.effects import CellResult, Effect
from aorta.sweep.metrics import RunMetric
from aorta.sweep.series import Series

WIDTH = 160


def table_lines(series: Series, results: Sequence[CellResult]) -> list[str]:
    lines = [headline(series, results), ""]
    table = Table(box=None, padding=(0, 2, 0, 0), show_edge=False)
    table.add_column("cell", overflow="fold")
    table.add_column("failed", justify="right", no_wrap=True)
    for metric in series.metrics:
        table.add_column(titled(metric), justify="right", no_wrap=True)
        table.add_column("against the baseline", no_wrap=True)
    for result in results:
        cells = [result.name, failed_text(result)]
        for effect in result.effects:
            value = numbers.number(effect.value)
            if value.startswith("<"):  # of a metric that has its own scale
                value = f"{effect.value:.4g}"
            cells += [value, effect_text(effect, series.matters)]
        table.add_row(*cells)
    console = Console(width=WIDTH, no_color=True, highlight=False, markup=False)
    with console.capture() as captured:
        console.print(table)
    lines += [line.rstrip() for line in captured.get().splitlines()]
    lines += ["", *notes_of(series, results)]
    return lines


def headline(series: Series, results: Sequence[CellResult]) -> str:
    """What the matrix says, in one line."""
    done, total = len(series.runs), len(series.variants) * series.most_rounds
    number = f"{len(results)} cells x {series.most_rounds} trials"
    if done < total:
        number += f", {done} of {total} runs done"
    if total == done == 0:
        return number
    parts = []
    metric = series.metrics[0]
    decided = [
        (result, result.effects[0])
        for result in results[1:]
        if result.effects[0].verdict in ("faster", "better", "slower", "worse", "higher", "lower")
    ]
    for words in (("faster", "better", "lower"), ("slower", "worse", "higher")):
        found = [(r, e) for r, e in decided if e.verdict in words]
        if found:
            name, effect = max(
                ((r.name, e) for r, e in found), key=lambda one: abs((one[1].ratio or 1.0) - 1)
            )
            more = f", {len(found) - 1} more" if len(found) > 1 else ""
            parts.append(f"{name} is {effect.verdict} ({_change(effect)}{more})")
    rates = [result for result in results[1:] if result.failures.verdict.startswith("fails")]
    parts += [f"{result.name} {result.failures.verdict} ({failed_text(result)})" for result in rates]
    if not parts:
        parts = [f"no cell is told from the baseline by {metric.name} or failures"]
    return f"{number}: {'; '.join(parts)}"


def titled(metric: RunMetric) -> str:
    """step_ms, 'loss', 'mfu, %': with the unit where the name does not end in it."""
    return (
        metric.name
        if metric.name.endswith(f"_{metric.unit}") or not metric.unit
        else f"{metric.name}, {metric.unit}"
    )


def failed_text(result: CellResult) -> str:
    rate = result.failures
    if not rate.num_runs:
        return "not run"
    low, high = rate.interval
    text = f"{rate.num_failed} of {rate.num_runs} [{100 * low:.0f}, {100 * high:.0f}] %"
    return f"{text} {rate.verdict}" if rate.verdict.startswith("fails") else text


def effect_text(effect: Effect, matters: float) -> str:
    if effect.verdict == "not judged":
        return effect.reason
    word = f"same within {100 * matters:g} %" if effect.verdict == "same" else effect.verdict
    return " ".join(filter(None, (word, _change(effect), f"({effect.reason})" if effect.reason else "")))


def _change(effect: Effect) -> str:
    if effect.ratio is None or effect.interval is None:
        return ""
    low, high = effect.interval
    if high / low > 100:
        return ""
    return f"{100 * (effect.ratio - 1):+.1f} % [{100 * (low - 1):+.1f}, {100 * (high - 1):+.1f}]"


def notes_of(series: Series, results: Sequence[CellResult]) -> list[str]:
    lines = [f"baseline: {results[0].name}: {results[0].command}"]
    for result in results:
        if result.failures.first_line:
            lines.append(f"{result.name}: first failure: {result.failures.first_line}")
        lines += [f"{result.name}: {note}" for note in result.notes]
    unread = [run for run in series.runs if not run.is_failed and run.failure]
    if unread:
        lines.append(f"{len(unread)} runs ended well and lack a value ({unread[0].failure})")
    compared = (len(results) - 1) * len(series.metrics)
    lines.append(
        f"{compared} comparison{'s' * (compared != 1)}: all intervals of changes hold together in 95 % of"
        " matrices; intervals of failures are 95 % each, their verdicts hold together"
    )
    return lines
