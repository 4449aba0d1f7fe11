"""A comparison on the terminal: the answer, then what was judged, then what could not be."""

from itertools import groupby

from rich.console import Console
from rich.table import Table

from aorta.queues.cli.numbers import plain
from aorta.results.compare import Compared, ResultComparison
from aorta.results.schema import Value

_COLOURS = {"regression": "red", "no regression": "green", "cannot tell": "yellow", "not judged": ""}


def show_comparison(comparison: ResultComparison) -> None:
    console = Console(highlight=False)
    judged = [row for row in comparison.rows if row.verdict != "not judged"]
    console.print(
        _coloured(comparison.verdict), f"  threshold {100 * comparison.threshold:g} %, {len(judged)} judged"
    )
    if judged:
        names = _varying(judged)
        for name, group in groupby(judged, key=lambda row: name_of(row.configuration, names)):
            console.print(name, markup=False, style="bold", soft_wrap=True)
            console.print(_table(list(group)))
        for reason in _reasons(judged, names):
            console.print(f"cannot tell: {reason}", markup=False, soft_wrap=True)
    for title, rows in (
        ("only in baseline", comparison.only_baseline),
        ("only in test", comparison.only_test),
    ):
        for configuration in rows:
            console.print(f"{title}: {name_of(configuration)}", markup=False)
    for note in comparison.notes:
        console.print(note, markup=False, soft_wrap=True)
    for name, (old, new) in comparison.differences.items():
        console.print(f"differs: {name}: {old} | {new}", markup=False, soft_wrap=True)


def name_of(configuration: dict[str, Value], names: tuple[str, ...] = ("workload", "streams")) -> str:
    """The part of a configuration that tells it from others, in one line."""
    settings = {name: configuration[name] for name in names if name in configuration} or configuration
    return " ".join(f"{name}={value}" for name, value in settings.items())


def _varying(rows: list[Compared]) -> tuple[str, ...]:
    """Keys whose values differ between the rows."""
    names = dict.fromkeys(name for row in rows for name in row.configuration)
    varying = [n for n in names if len({str(row.configuration.get(n)) for row in rows}) > 1]
    return tuple(dict.fromkeys((*(n for n in ("workload", "streams") if n in names), *varying)))


def _table(rows: list[Compared]) -> Table:
    """Table of one configuration; widths are fixed, so that tables stand below each other."""
    table = Table(box=None, pad_edge=False)
    columns = {"metric": 18, "baseline": 9, "test": 9, "ratio": 6, "95 %": 14, "verdict": 13}
    for name, width in columns.items():
        left = name in ("metric", "verdict")
        table.add_column(name, justify="left" if left else "right", min_width=width, no_wrap=True)
    for row in rows:
        ends = (row.interval.low, row.interval.high) if row.interval is not None else (None, None)
        table.add_row(
            row.metric,
            "n/a" if row.baseline is None else plain(row.baseline),
            "n/a" if row.test is None else plain(row.test),
            "" if row.ratio is None else f"{row.ratio:.3f}",
            " to ".join(f"{end:.3f}" for end in ends if end is not None),
            _coloured(row.verdict),
        )
    return table


def _reasons(rows: list[Compared], names: tuple[str, ...]) -> list[str]:
    return [f"{name_of(row.configuration, names)} {row.metric}: {row.reason}" for row in rows if row.reason]


def _coloured(verdict: str) -> str:
    colour = _COLOURS[verdict]
    return f"[{colour}]{verdict}[/{colour}]" if colour else verdict
