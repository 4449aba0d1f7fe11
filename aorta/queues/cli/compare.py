"""compare: two results, by configuration."""

import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from aorta.command_line import output_of_verdict
from aorta.errors import ConfigError

if TYPE_CHECKING:
    from aorta.results.compare import ResultComparison


def threshold_of(text: str) -> float:
    """0.05 of "5%" or "0.05"."""
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = math.nan
    if not 0 <= value < 1:
        raise ConfigError(f"--threshold must be a share such as 5% or 0.05, got {text!r}")
    return value


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
@click.option("--threshold", default="5%", show_default=True, help="What is still no regression.")
@click.option("--any-device", is_flag=True, help="Judge results of different devices too.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout, nothing else.")
def compare_command(
    baseline: tuple[Path, ...], test: tuple[Path, ...], threshold: str, any_device: bool, as_json: bool
) -> None:
    """Judge TEST against BASELINE. Exit code 0: no regression; 1: regression; 3: cannot tell."""
    comparison = compare_files(baseline, test, threshold, any_device)
    with output_of_verdict():
        if as_json:
            from aorta.results.schema import to_json

            sys.stdout.buffer.write(to_json(comparison) + b"\n")
        else:
            from aorta.queues.cli.show_comparison import show_comparison

            show_comparison(comparison)
    sys.exit(comparison.exit_status)


def compare_files(
    baseline: tuple[Path, ...], test: tuple[Path, ...], threshold: str, any_device: bool
) -> "ResultComparison":
    """The comparison of files as the command line names them: of queues, or of training sweeps."""
    from aorta.results.compare_sweeps import compare_sweeps
    from aorta.results.schema import read_document

    share = threshold_of(threshold)
    old, new = ([read_document(path) for path in paths] for paths in (baseline, test))
    return compare_sweeps(old, new, share, any_device)
