"""run, sweep, run-priority: measure, print, write."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from aorta.errors import ConfigError
from aorta.queues.catalogue import PRIORITIES
from aorta.queues.cli.options import (
    DailyCommand,
    WorkloadCommand,
    measuring_options,
    options_of,
    plan_of,
    ready_ranks,
    split,
    stream_count,
    stream_counts,
)

if TYPE_CHECKING:
    from aorta.account.results.schema import Document, Point
    from aorta.device.ranks import Ranks
    from aorta.queues.harness.iterate import PointPlan

WRONG = 1
"""Exit code: results that are wrong, or a point that failed."""
STOPPED = 130
"""Exit code: interrupted, as a shell has it."""
INTERRUPTED = "interrupted before it was measured"


@click.command("run", cls=WorkloadCommand)
@click.argument("workload")
@click.option("--streams", "-s", default="4")
@click.option("--output", "-o", type=click.Path(path_type=Path))
@measuring_options(iterations=100)
def run_command(workload: str, streams: str, output: Path | None, **values: Any) -> None:
    """Measure WORKLOAD at one stream count."""
    _measure_workload(workload, streams, output, values, is_sweep=False)


@click.command("sweep", cls=WorkloadCommand)
@click.argument("workload")
@click.option("--streams", "-s", default="1,2,4,8,16,32")
@click.option("--output", "-o", type=click.Path(path_type=Path))
@measuring_options(iterations=100)
def sweep_command(workload: str, streams: str, output: Path | None, **values: Any) -> None:
    """Measure WORKLOAD over stream counts."""
    _measure_workload(workload, streams, output, values, is_sweep=True)


def _measure_workload(
    workload: str, streams: str, output: Path | None, values: dict[str, Any], is_sweep: bool
) -> None:
    from aorta.queues.harness.measure import refusal
    from aorta.queues.workloads import find

    kind = find(workload)
    common, of_workload = split(values)
    options = options_of(kind, of_workload)
    counts = stream_counts(streams) if is_sweep else [stream_count(streams)]
    ranks = ready_ranks(common)
    plans = [plan_of(kind, options, count, common, ranks) for count in counts]
    reasons = [refusal(plan, ranks.device.type, ranks.world_size) for plan in plans]
    if all(reasons):
        raise ConfigError(f"{'no point of the sweep is possible: ' if is_sweep else ''}{reasons[0]}")
    _measure_all(plans, ranks, common, output, is_sweep=is_sweep)


@click.command("run-priority", cls=DailyCommand)
@click.argument("priority", type=click.Choice([*PRIORITIES, "all"]))
@click.option("--streams", "-s", default="1,2,4,8,16")
@click.option("--output", "-o", type=click.Path(path_type=Path))
@measuring_options(iterations=50)
def priority_command(priority: str, streams: str, output: Path | None, **common: Any) -> None:
    """Measure every workload of a priority over stream counts."""
    from aorta.queues.workloads import workloads

    counts = stream_counts(streams)
    ranks = ready_ranks(common)
    chosen = [kind for kind in workloads().values() if priority in (kind.priority, "all")]
    plans = [plan_of(kind, kind.Options(), count, common, ranks) for kind in chosen for count in counts]
    _measure_all(plans, ranks, common, output, is_sweep=True)


def _measure_all(
    plans: "Sequence[PointPlan]", ranks: "Ranks", common: dict[str, Any], output: Path | None,
    is_sweep: bool = False,
) -> None:  # fmt: skip
    """Measure, write, print and exit."""
    import msgspec

    from aorta.account.results.schema import write_document
    from aorta.queues.harness.measure import document
    from aorta.queues.harness.scaling import scalings

    _check_files(output, plans, common, ranks)
    points = _measure(plans, ranks, common)
    if not ranks.is_first:
        sys.exit(_status(points))
    result = document(points, ranks)
    if is_sweep:
        result = msgspec.structs.replace(result, scaling=scalings(points))
    if output is not None:
        write_document(output, result, common["overwrite"])
    if common["as_json"]:
        _print_json(result)
    else:
        from aorta.queues.cli.show import show_run, show_sweep

        (show_sweep if is_sweep else show_run)(result, output)
    sys.exit(_status(points))


def _check_files(
    output: Path | None, plans: "Sequence[PointPlan]", common: dict[str, Any], ranks: "Ranks"
) -> None:
    from aorta.account.results.schema import check_output
    from aorta.queues.harness.measure import check_folder, trace_name

    if output is not None:
        check_output(output, common["overwrite"])
    for plan in plans:
        if plan.profile_dir is not None:
            name = trace_name(plan.workload.name, plan.streams, ranks.rank)
            check_folder(plan.profile_dir, name, common["overwrite"])


def _measure(plans: "Sequence[PointPlan]", ranks: "Ranks", common: dict[str, Any]) -> "list[Point]":
    from aorta.device.ranks import process_group
    from aorta.queues.harness.measure import measure_points, unmeasured

    quiet = common["as_json"] or not ranks.is_first

    def started(plan: "PointPlan") -> None:
        if not quiet and sys.stderr.isatty():
            click.echo(f"{plan.workload.name}, {plan.streams} streams …", err=True)

    points: list[Point] = []
    with process_group(ranks, common["backend"]):
        backend = ranks.backend
        try:
            for point in measure_points(plans, ranks, not common["no_switch"], started):
                points.append(point)
        except KeyboardInterrupt:
            if not any(point.status == "measured" for point in points):
                raise  # nothing to keep
            points += [unmeasured(plan, ranks, "skipped", INTERRUPTED) for plan in plans[len(points) :]]
    ranks.backend = backend  # for the document: the group itself is gone
    return points


def _status(points: "Sequence[Point]") -> int:
    if any(point.reason == INTERRUPTED for point in points):
        return STOPPED
    return WRONG if any(point.status == "failed" for point in points) else 0


def _print_json(result: "Document") -> None:
    from aorta.account.results.schema import to_json

    sys.stdout.buffer.write(to_json(result) + b"\n")
    sys.stdout.buffer.flush()
