"""What run, sweep and run-priority do once the command line has been read: measure, print, write.

Apart from the commands: their help does without torch, which all of this needs.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import msgspec

from aorta.errors import ConfigError
from aorta.hw_queue_eval.core.aggregate import skipped
from aorta.hw_queue_eval.core.bench import Plan
from aorta.hw_queue_eval.core.points import check_plan, document, measure_points, refusal
from aorta.hw_queue_eval.core.profiling import check_folder, trace_name
from aorta.hw_queue_eval.core.results import Document, Point, check_output, to_json, write_document
from aorta.hw_queue_eval.core.scaling import scalings
from aorta.hw_queue_eval.ranks import (
    Ranks,
    check_backend,
    choose_device,
    process_group,
    ranks_from_environment,
)
from aorta.hw_queue_eval.workload import Workload, WorkloadOptions

WRONG = 1
"""Exit code: results that are wrong, or a point that failed."""
STOPPED = 130
"""Exit code: interrupted, as a shell has it."""
INTERRUPTED = "interrupted before it was measured"


def measure_one(
    kind: type[Workload], options: WorkloadOptions, streams: int, own: dict[str, Any], output: Path | None
) -> None:
    """Ends the process."""
    ranks = ready_ranks(own)
    plan = plan_of(kind, options, streams, own, ranks)
    if reason := refusal(plan, ranks.device.type, ranks.world_size):
        raise ConfigError(reason)
    _check_files(output, [plan], own, ranks)
    points = _measure([plan], ranks, own)
    if not ranks.is_first:
        sys.exit(_status(points))
    found = document(points, ranks)
    if output is not None:
        write_document(output, found, own["overwrite"])
    if own["as_json"]:
        _print_json(found)
    else:
        from aorta.hw_queue_eval.cli.show import show_run

        show_run(found, output)
    sys.exit(_status(points))


def measure_counts(
    kind: type[Workload],
    options: WorkloadOptions,
    counts: Sequence[int],
    own: dict[str, Any],
    output: Path | None,
    plots: Path | None,
) -> None:
    """One workload over stream counts. Ends the process."""
    ranks = ready_ranks(own)
    plans = [plan_of(kind, options, count, own, ranks) for count in counts]
    reasons = [refusal(plan, ranks.device.type, ranks.world_size) for plan in plans]
    if all(reasons):
        raise ConfigError(f"no point of the sweep is possible: {reasons[0]}")
    _sweep(plans, ranks, own, output, plots)


def measure_all(
    kinds: Sequence[type[Workload]],
    counts: Sequence[int],
    own: dict[str, Any],
    output: Path | None,
    plots: Path | None,
) -> None:
    """Several workloads over stream counts, their options at the defaults. Ends the process."""
    ranks = ready_ranks(own)
    plans = [plan_of(kind, kind.Options(), count, own, ranks) for kind in kinds for count in counts]
    _sweep(plans, ranks, own, output, plots)


def ready_ranks(own: Mapping[str, Any]) -> Ranks:
    """The ranks with their devices; no process group yet."""
    ranks = ranks_from_environment()
    ranks.device = choose_device(own["device"], ranks)
    if own["backend"]:
        check_backend(own["backend"], ranks.device)
        if not ranks.launched:
            raise ConfigError(f"--backend {own['backend']} needs a process group; start with torchrun")
    return ranks


def plan_of(
    workload: type[Workload], options: WorkloadOptions, streams: int, own: Mapping[str, Any], ranks: Ranks
) -> Plan:
    """ConfigError for numbers that cannot be."""
    if own["iterations"] < 1:
        raise ConfigError(f"--iterations must be at least 1, got {own['iterations']}")
    if own["warmup"] < 0:
        raise ConfigError(f"--warmup must not be negative, got {own['warmup']}")
    if own["budget_s"] is not None and not own["budget_s"] > 0:
        raise ConfigError(f"--budget-s must be positive, got {own['budget_s']}")
    plan = Plan(
        workload=workload,
        options=options,
        streams=streams,
        size=own["size"] or ("small" if ranks.device.type == "cpu" else "full"),
        sync_mode=own["sync_mode"],
        iterations=own["iterations"],
        warmup=own["warmup"],
        seed=own["seed"],
        piece_iterations=0 if own["no_pieces"] else Plan.piece_iterations,
        kernel_iterations=0 if own["no_calibrate"] else Plan.kernel_iterations,
        budget_s=own["budget_s"],
        profile_dir=own["profile_dir"] if own["profile"] else None,
    )
    check_plan(plan, ranks.world_size)
    return plan


def _sweep(
    plans: Sequence[Plan], ranks: Ranks, own: dict[str, Any], output: Path | None, plots: Path | None
) -> None:
    _check_files(output, plans, own, ranks)
    if plots is not None:
        from aorta.hw_queue_eval.plots import draw, picture_path

        for plan in plans:
            check_output(picture_path(plots, plan.workload.name), own["overwrite"])
    points = _measure(plans, ranks, own)
    if not ranks.is_first:
        sys.exit(_status(points))
    found = msgspec.structs.replace(document(points, ranks), scaling=scalings(points))
    if output is not None:
        write_document(output, found, own["overwrite"])
    pictures = []
    if plots is not None:
        pictures = draw(found, plots, own["overwrite"])
    if own["as_json"]:
        _print_json(found)
    else:
        from aorta.hw_queue_eval.cli.show import show_sweep

        show_sweep(found, output, pictures)
    sys.exit(_status(points))


def _check_files(output: Path | None, plans: Sequence[Plan], own: dict[str, Any], ranks: Ranks) -> None:
    if output is not None:
        check_output(output, own["overwrite"])
    for plan in plans:
        if plan.profile_dir is not None:
            name = trace_name(plan.workload.name, plan.streams, ranks.rank)
            check_folder(plan.profile_dir, name, own["overwrite"])


def _measure(plans: Sequence[Plan], ranks: Ranks, own: dict[str, Any]) -> list[Point]:
    quiet = own["as_json"] or not ranks.is_first

    def started(plan: Plan) -> None:
        if not quiet and sys.stderr.isatty():
            click.echo(f"{plan.workload.name}, {plan.streams} streams …", err=True)

    points: list[Point] = []
    with process_group(ranks, own["backend"]):
        used = ranks.backend
        try:
            for point in measure_points(plans, ranks, not own["no_switch"], started):
                points.append(point)
        except KeyboardInterrupt:
            if not any(point.status == "measured" for point in points):
                raise  # nothing to keep
            device_type, world_size = ranks.device.type, ranks.world_size
            rest = plans[len(points) :]
            points += [skipped(plan, device_type, world_size, INTERRUPTED) for plan in rest]
    ranks.backend = used  # for the document: the group itself is gone
    return points


def _status(points: Sequence[Point]) -> int:
    if any(point.reason == INTERRUPTED for point in points):
        return STOPPED
    return WRONG if any(point.status == "failed" for point in points) else 0


def _print_json(found: Document) -> None:
    sys.stdout.buffer.write(to_json(found) + b"\n")
    sys.stdout.buffer.flush()
