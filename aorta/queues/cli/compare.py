"""compare: judges two results of run or sweep, matched by configuration.

Prints the verdict first, then the metrics judged, then the configurations that only one side has.
"""

import math
import sys
from itertools import groupby
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from aorta.account.results.compare import Compared, ResultComparison
from aorta.account.results.schema import Value, read_document, to_json
from aorta.command_line import output_of_verdict
from aorta.errors import ConfigError
from aorta.queues.cli.show import plain

_COLOURS = {"regression": "red", "no regression": "green", "cannot tell": "yellow", "not judged": ""}


@click.command("compare")
@click.option(
    "--baseline",
    "-b",
    required=True,
    multiple=True,
    type=click.Path(path_type=Path),
    help="Result of run or sweep; several are several runs of the same.",
)
@click.option("--test", "-t", required=True, multiple=True, type=click.Path(path_type=Path))
@click.option("--threshold", default="5%", help="What is still no regression.")
@click.option("--any-device", is_flag=True, help="Judge results of different devices too.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout, nothing else.")
def compare_command(
    baseline: tuple[Path, ...], test: tuple[Path, ...], threshold: str, any_device: bool, as_json: bool
) -> None:
    """Judge TEST against BASELINE. Exit code 0: no regression; 1: regression; 3: cannot tell."""
    comparison = compare_files(baseline, test, threshold, any_device)
    with output_of_verdict():
        if as_json:
            sys.stdout.buffer.write(to_json(comparison) + b"\n")
        else:
            show_comparison(comparison)
    sys.exit(comparison.exit_status)


def compare_files(
    baseline: tuple[Path, ...], test: tuple[Path, ...], threshold: str, any_device: bool
) -> ResultComparison:
    """Compares files as the command line names them: results of queues."""
    from aorta.account.results.compare import compare

    share = threshold_of(threshold)
    old, new = ([read_document(path) for path in paths] for paths in (baseline, test))
    return compare(old, new, share, any_device)


def threshold_of(text: str) -> float:
    """The share that "5%" or "0.05" stands for. ConfigError unless it is from 0 to below 1."""
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = math.nan
    if not 0 <= value < 1:
        raise ConfigError(f"--threshold must be a share such as 5% or 0.05, got {text!r}")
    return value


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
