"""run, sweep and run-priority, as the command line has them."""

from pathlib import Path
from typing import Any

import click

from aorta.hw_queue_eval.cli.options import (
    WorkloadCommand,
    measuring_options,
    options_of,
    split,
    stream_count,
    stream_counts,
)
from aorta.hw_queue_eval.registry import PRIORITIES, find, workloads

# A command imports what measures, and torch with it, once the command line has been read.


@click.command("run", cls=WorkloadCommand)
@click.argument("workload")
@click.option("--streams", "-s", default="4", show_default=True)
@click.option("--output", "-o", type=click.Path(path_type=Path))
@measuring_options(iterations=100)
def run_command(workload: str, streams: str, output: Path | None, **given: Any) -> None:
    """Measure WORKLOAD at one stream count."""
    kind = find(workload)
    own, theirs = split(given)
    options, count = options_of(kind, theirs), stream_count(streams)
    from aorta.hw_queue_eval.cli.measure import measure_one

    measure_one(kind, options, count, own, output)


@click.command("sweep", cls=WorkloadCommand)
@click.argument("workload")
@click.option("--streams", "-s", default="1,2,4,8,16,32", show_default=True)
@click.option("--output", "-o", type=click.Path(path_type=Path))
@click.option("--plots", type=click.Path(path_type=Path), help="Folder for PNGs of the sweep.")
@measuring_options(iterations=100)
def sweep_command(workload: str, streams: str, output: Path | None, plots: Path | None, **given: Any) -> None:
    """Measure WORKLOAD over stream counts."""
    kind = find(workload)
    own, theirs = split(given)
    options, counts = options_of(kind, theirs), stream_counts(streams)
    from aorta.hw_queue_eval.cli.measure import measure_counts

    measure_counts(kind, options, counts, own, output, plots)


@click.command("run-priority", cls=click.Command)
@click.argument("priority", type=click.Choice([*PRIORITIES, "all"]))
@click.option("--streams", "-s", default="1,2,4,8,16", show_default=True)
@click.option("--output", "-o", type=click.Path(path_type=Path))
@click.option("--plots", type=click.Path(path_type=Path), help="Folder for PNGs of the sweeps.")
@measuring_options(iterations=50)
def priority_command(
    priority: str, streams: str, output: Path | None, plots: Path | None, **own: Any
) -> None:
    """Measure every workload of a priority over stream counts."""
    counts = stream_counts(streams)
    chosen = [one for one in workloads().values() if priority in (one.priority, "all")]
    from aorta.hw_queue_eval.cli.measure import measure_all

    measure_all(chosen, counts, own, output, plots)
