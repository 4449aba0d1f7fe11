"""Options of run, sweep, run-priority and profile, the workloads' own among them."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from aorta.command_line import SHOWS_ALL, Decorated, OneScreenCommand, option_group
from aorta.errors import ConfigError
from aorta.queues import catalogue
from aorta.queues.catalogue import MAX_STREAMS, SYNC_MODES, ListedOption, flag_of

if TYPE_CHECKING:
    from aorta.device.ranks import Ranks
    from aorta.queues.harness.iterate import PointPlan
    from aorta.queues.workload import Workload, WorkloadOptions

_PREFIX = "workload_option_"
_HERE = "aorta.queues.cli."
_NAMED, _PARAMETERS = _HERE + "workload", _HERE + "workload_parameters"
"""Keys of click's `context.meta`, through which callbacks hand values to the commands."""

DAILY = {
    "streams",
    "output",
    "iterations",
    "sync_mode",
    "device",
    "budget_s",
    "as_json",
    "overwrite",
}
"""Options that --help shows; --help-all shows the others too."""
WORKLOAD_NOTE = "For the options of a workload name it before --help."


def measuring_options(iterations: int) -> Callable[[Decorated], Decorated]:
    """Options of the measurement and of its output."""
    return option_group(
        click.option("--iterations", "-i", type=int, default=iterations),
        click.option("--warmup", "-w", type=int, default=10),
        click.option(
            "--sync-mode", type=click.Choice(SYNC_MODES), default="per_iteration",
            help="Join and wait each iteration; join each, wait at the end; no join between iterations.",
        ),
        click.option("--device", "-d", default="auto", help="auto, cpu, cuda, cuda:N"),
        click.option("--backend", type=click.Choice(["nccl", "gloo"]), help="Default: nccl on GPUs."),
        click.option("--size", type=click.Choice(["small", "full"]), help="Default: full on a GPU."),
        click.option("--seed", type=int, default=0),
        click.option("--budget-s", type=float, help="Fewer iterations where they would take longer."),
        click.option("--no-pieces", is_flag=True, help="Do not time single pieces (achieved concurrency)."),
        click.option("--no-switch", is_flag=True, help="Do not measure the queue switch overhead."),
        click.option("--profile", is_flag=True, help="Trace a few further iterations with torch.profiler."),
        click.option("--profile-dir", type=click.Path(path_type=Path), default=Path("profiles")),
        click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout, nothing else."),
        click.option("--overwrite", is_flag=True, help="Replace files that are there."),
    )  # fmt: skip


class DailyCommand(OneScreenCommand):
    """A command whose help shows the options of daily use."""

    def is_daily(self, option: click.Option) -> bool:
        return option.name in DAILY or str(option.name).startswith(_PREFIX)


class WorkloadCommand(DailyCommand):
    """A command that has every option of every workload, found when they are needed. Its help shows those of
    the workload that is named; --help-all shows those of all where none is."""

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        listed = catalogue.catalogue()
        context.meta[_NAMED] = next((argument for argument in args if argument in listed), None)
        return super().parse_args(context, args)

    def get_params(self, context: click.Context) -> list[click.Parameter]:
        if _PARAMETERS not in context.meta:  # asked for several times in one call
            context.meta[_PARAMETERS] = workload_parameters(context.meta.get(_NAMED))
        if SHOWS_ALL in context.meta and context.meta.get(_NAMED) is None:
            for parameter in context.meta[_PARAMETERS]:
                parameter.hidden = False
        *common, help_option = super().get_params(context)
        return [*common, *context.meta[_PARAMETERS], help_option]

    def format_epilog(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_epilog(context, formatter)
        if context.meta.get(_NAMED) is None:
            formatter.write_paragraph()
            formatter.write_text(WORKLOAD_NOTE)


def workload_parameters(named: str | None) -> list[click.Option]:
    """One option per field name; the text is read when the workload is known.

    Shown are those of the workload that is named, without its name; of all, hidden, where none is.
    """
    owners_by_name: dict[str, tuple[ListedOption, list[str]]] = {}
    for workload in catalogue.catalogue().values():
        for option in workload.options:
            owners_by_name.setdefault(option.name, (option, []))[1].append(workload.name)
    parameters = []
    for option, owners in owners_by_name.values():
        parameter = _parameter(option)
        parameter.hidden = named not in owners
        parameter.help = option.help if named else f"{', '.join(owners)}: {option.help}".rstrip(": ")
        parameters.append(parameter)
    return parameters


def _parameter(option: ListedOption) -> click.Option:
    name = _PREFIX + option.name
    if option.notation == "bool":
        return click.Option([f"{option.flag}/--no-{option.flag[2:]}", name], default=None)
    choices = "|".join(option.choices) if option.choices else option.notation.upper()
    return click.Option([option.flag, name], metavar=choices)


def split(values: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str | bool]]:
    """The command's own options, and the workloads' that were given, by field name."""
    common = {name: value for name, value in values.items() if not name.startswith(_PREFIX)}
    of_workload = {
        name.removeprefix(_PREFIX): value
        for name, value in values.items()
        if name.startswith(_PREFIX) and value is not None
    }
    return common, of_workload


def options_of(workload: "type[Workload]", values: Mapping[str, str | bool]) -> "WorkloadOptions":
    """ConfigError for an option of another workload, by name."""
    from aorta.queues.options import fields, read_options
    from aorta.queues.workloads import workloads

    option_fields = fields(workload.Options)
    for name in values:
        if name not in option_fields:
            owners = [
                candidate.name for candidate in workloads().values() if name in fields(candidate.Options)
            ]
            raise ConfigError(f"{flag_of(name)} is an option of {', '.join(owners)}, not of {workload.name}")
    return read_options(workload.Options, values)


def stream_count(text: str) -> int:
    """ConfigError unless 1 to 64."""
    if not (text.strip().isascii() and text.strip().isdecimal()) or not 1 <= int(text) <= MAX_STREAMS:
        raise ConfigError(f"--streams must be 1 to {MAX_STREAMS}, got {text!r}")
    return int(text)


def stream_counts(text: str) -> list[int]:
    """Stream counts of `1,2,4`, rising, each once."""
    return sorted({stream_count(part) for part in text.split(",")})


def ready_ranks(common: Mapping[str, Any]) -> "Ranks":
    """The ranks with their devices; no process group yet."""
    from aorta.device.ranks import check_backend, choose_device, ranks_from_environment

    ranks = ranks_from_environment()
    ranks.device = choose_device(common["device"], ranks)
    if common["backend"]:
        check_backend(common["backend"], ranks.device)
        if not ranks.launched:
            raise ConfigError(f"--backend {common['backend']} needs a process group; start with torchrun")
    return ranks


def plan_of(
    workload: "type[Workload]",
    options: "WorkloadOptions",
    streams: int,
    common: Mapping[str, Any],
    ranks: "Ranks",
) -> "PointPlan":
    """ConfigError for numbers that cannot be."""
    from aorta.queues.harness.iterate import PointPlan
    from aorta.queues.harness.measure import check_plan

    if common["iterations"] < 1:
        raise ConfigError(f"--iterations must be at least 1, got {common['iterations']}")
    if common["warmup"] < 0:
        raise ConfigError(f"--warmup must not be negative, got {common['warmup']}")
    if common["budget_s"] is not None and not common["budget_s"] > 0:
        raise ConfigError(f"--budget-s must be positive, got {common['budget_s']}")
    plan = PointPlan(
        workload=workload,
        options=options,
        streams=streams,
        size=common["size"] or ("small" if ranks.device.type == "cpu" else "full"),
        sync_mode=common["sync_mode"],
        iterations=common["iterations"],
        warmup=common["warmup"],
        seed=common["seed"],
        piece_iterations=0 if common["no_pieces"] else PointPlan.piece_iterations,
        budget_s=common["budget_s"],
        profile_dir=common["profile_dir"] if common["profile"] else None,
    )
    check_plan(plan, ranks.world_size)
    return plan
