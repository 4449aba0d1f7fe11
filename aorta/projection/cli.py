"""python -m aorta.projection: what a training step should cost, without a GPU."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from aorta.command_line import OneLineGroup
from aorta.config.yaml_files import near
from aorta.errors import AortaError, ConfigError
from aorta.projection import output
from aorta.projection.job_file import CompareCommand, JobCommand, SweepCommand
from aorta.projection.memory import memory as memory_of
from aorta.projection.options import (
    CLOCK_OPTION,
    PLAN_OPTIONS,
    SEARCH_OPTIONS,
    SEARCHED,
    WHAT_IF_OPTIONS,
    model_and_hardware,
    options,
    overrides,
    read,
)
from aorta.projection.plan import check_count
from aorta.projection.prices import factors_of
from aorta.projection.step import project

if TYPE_CHECKING:
    from aorta.projection.prices import Anchor
    from aorta.projection.software import Release
    from aorta.projection.whatif import Job

SETTINGS = (click.argument("settings", nargs=-1, metavar="[KEY=VALUE]..."),)
JSON_OPTION = (click.option("--json", "as_json", is_flag=True, help="Print one JSON object."),)


@click.group(cls=OneLineGroup, context_settings={"show_default": True})
def main() -> None:
    """Step time, throughput and memory of LLM training from a model, a layout and a hardware file."""


@main.command(cls=JobCommand)
@options(SETTINGS, PLAN_OPTIONS, CLOCK_OPTION, WHAT_IF_OPTIONS, JSON_OPTION)
def performance(**option_values: Any) -> None:
    """Step time, tokens per second and GPU, and where the time goes."""
    job = job_of(option_values)
    model, plan, hardware = job.model, job.plan, job.hardware
    projection = project(model, plan, job.pricer())
    memory_estimate = memory_of(model, plan, hardware.memory.hbm_bytes)
    result = output.performance(projection, memory_estimate)
    _print(option_values["as_json"], result, output.performance_text)


@main.command(cls=JobCommand)
@options(SETTINGS, PLAN_OPTIONS, WHAT_IF_OPTIONS[:1], JSON_OPTION)
def memory(**option_values: Any) -> None:
    """Memory of the fullest rank, and whether it fits."""
    model, plan, hardware, *_ = job_of(option_values)
    memory_estimate = memory_of(model, plan, hardware.memory.hbm_bytes)
    _print(
        option_values["as_json"], output.memory(memory_estimate, model, plan, hardware), output.memory_text
    )


@main.command(cls=JobCommand)
@options(SETTINGS, PLAN_OPTIONS, CLOCK_OPTION, WHAT_IF_OPTIONS, JSON_OPTION)
def explain(**option_values: Any) -> None:
    """Every operation with its time, bound and source; the step without each term."""
    job = job_of(option_values)
    explanation = output.explain(job.model, job.plan, job.pricer())
    _print(option_values["as_json"], explanation, output.explain_text)


@main.command(cls=JobCommand)
@options(SETTINGS, SEARCH_OPTIONS, CLOCK_OPTION, WHAT_IF_OPTIONS)
@click.option("--gpus", required=True, type=int)
@click.option("--top", type=int, default=15)
@options(JSON_OPTION)
def search(**option_values: Any) -> None:
    """Legal layouts that fit into memory, fastest first, and the Pareto front of speed and memory."""
    from aorta.projection import search as searching

    release, fixed, first = _searched(option_values)
    job = job_of(first, _recorded(option_values))
    plain = _plain_job(first)
    fixed["changes"] = {
        name: value
        for name, value in msgspec.structs.asdict(job.plan).items()
        if value != getattr(plain.plan, name)
    }
    layouts = searching.search(
        job,
        release,
        fixed,
        option_values["top"],
    )
    _print(option_values["as_json"], layouts, searching.text)


def _recorded(option_values: dict[str, Any]) -> dict[str, Any]:
    """Options of a search's job with the layout that its file names: that of a recorded run, if any."""
    path = option_values.get("job")
    named: dict[str, Any] = {}
    if path is not None:
        arguments = ["--job", str(path), "--model", option_values["model"]]  # which the file may leave out
        context = main.commands["performance"].make_context("measured", arguments)
        named = {name: context.params[name] for name in SEARCHED}
    return {**SEARCHED, **named, **option_values}


def _searched(option_values: dict[str, Any]) -> tuple["Release", dict[str, Any], dict[str, Any]]:
    """Release, what all layouts of a search share, and the options of the first legal one."""
    from aorta.projection.search import candidates
    from aorta.projection.software import load_stack

    gpus, most = option_values["gpus"], option_values["gpus_per_node"]
    for name in ("gpus", "gpus_per_node", "top", "seq_len", "global_batch_size"):
        if option_values[name] is not None:
            check_count(name, option_values[name])
    if option_values["global_batch_size"] is None:
        raise ConfigError("search needs --global-batch-size: layouts are compared at one batch")
    node = min(gpus, most)
    if gpus % node:
        raise ConfigError(f"--gpus {gpus} must be a multiple of --gpus-per-node {most}")
    first = {**SEARCHED, **option_values, "nodes": gpus // node, "gpus_per_node": node}
    model, hardware = model_and_hardware(first)
    release = load_stack(first["stack"])
    shared = ("nodes", "gpus_per_node", "global_batch_size", "seq_len", "dtype", "fp8_scaling", "task")
    fixed = {
        "layout": {name: first[name] for name in shared},
        "overrides": overrides(option_values),
        "compile_blocks": option_values["compile_blocks"],
        "changes": {},
    }
    plan = next(candidates(model, hardware, release, fixed), None)
    if plan is None:
        raise ConfigError(
            f"no layout of {gpus} x {hardware.name} is legal for a batch of {first['global_batch_size']}"
        )
    axes = ("dp", "tp", "pp", "vpp", "cp", "ep", "micro_batch_size", "recompute", "sharding")
    return release, fixed, first | {name: getattr(plan, name) for name in axes}


@main.command(cls=CompareCommand)
@options(PLAN_OPTIONS, CLOCK_OPTION, WHAT_IF_OPTIONS)
@click.argument("other", nargs=-1, required=True, metavar="KEY=VALUE...")
@options(JSON_OPTION)
def compare(other: tuple[str, ...], **option_values: Any) -> None:
    """The job (A) beside the same with changes (B): KEY=VALUE as in --set, or an option such as tp=4."""
    from aorta.projection import whatif

    first = job_of(option_values)
    changes = [text for text in other if "." in text.partition("=")[0]]
    flags = flags_of([text for text in other if text not in changes], compare, option_values)
    second = whatif.changed(job_of(flags, option_values), changes)
    comparison = whatif.compared(
        project(first.model, first.plan, first.pricer()),
        project(second.model, second.plan, second.pricer()),
    )
    _print(option_values["as_json"], comparison, whatif.compared_text)


@main.command(cls=SweepCommand)
@options(PLAN_OPTIONS, CLOCK_OPTION, WHAT_IF_OPTIONS)
@click.argument("settings", nargs=-1, required=True, metavar="[KEY=VALUE]... AXIS=FIRST..LAST|A,B,C")
@options(JSON_OPTION)
def sweep(settings: tuple[str, ...], **option_values: Any) -> None:
    """The job over gpus (a batch per GPU kept), or over an option such as tp, pp, cp, ep, seq-len."""
    from aorta.projection import whatif

    axis, _, span = settings[-1].partition("=")
    rows: list[tuple[int, Any]] = []
    for value in whatif.sweep_values(span):
        try:
            flags = (
                with_gpus(option_values, value)
                if axis == "gpus"
                else flags_of([f"{axis}={value}"], sweep, option_values)
            )
            job = job_of(flags, option_values)
            rows.append((value, project(job.model, job.plan, job.pricer())))
        except AortaError as error:
            rows.append((value, error))
    if all(isinstance(row, AortaError) for _, row in rows):
        raise rows[0][1]
    _print(option_values["as_json"], whatif.swept(rows, axis), whatif.swept_text)


def with_gpus(option_values: dict[str, Any], gpus: int) -> dict[str, Any]:
    """The options on another number of GPUs, with as many sequences for each."""
    node = option_values["gpus_per_node"]
    previous_gpus = option_values["nodes"] * node
    per_node = min(gpus, node)
    if per_node < 1 or previous_gpus < 1 or gpus % per_node:
        raise ConfigError(f"gpus={gpus} must be a multiple of --gpus-per-node {node}, and nodes at least 1")
    changed = {**option_values, "gpus_per_node": per_node, "nodes": gpus // per_node, "dp": None}
    if option_values["global_batch_size"] is not None:
        batch = option_values["global_batch_size"] * gpus
        if batch % previous_gpus:
            raise ConfigError(
                f"--global-batch-size {option_values['global_batch_size']} does not scale to {gpus} GPUs"
            )
        changed["global_batch_size"] = batch // previous_gpus
    return changed


def flags_of(texts: list[str], command: click.Command, option_values: dict[str, Any]) -> dict[str, Any]:
    """The options with some of them given anew, read as the command would read them."""
    command_options = {option.name: option for option in command.params if isinstance(option, click.Option)}
    changed = dict(option_values)
    for text in texts:
        name, equals, value = text.partition("=")
        option = command_options.get(name.strip().lstrip("-").replace("-", "_"))
        if not equals or option is None or option.name is None:
            raise ConfigError(f"{text}: write an option and its value{near(name, command_options)}")
        context = click.Context(command)
        changed[option.name] = option.type_cast_value(context, value)
        if option.name in ("tp", "pp", "cp", "nodes", "gpus_per_node"):
            changed["dp"] = None
    return changed


def job_of(option_values: dict[str, Any], recorded: dict[str, Any] | None = None) -> "Job":
    """The job that the options name, with its what-ifs and the measured step that it starts from.

    recorded: options of the job that was measured, as far as its record and --measured-as say nothing else;
    None: these.
    """
    from aorta.projection.whatif import changed

    job = changed(_plain_job(option_values), option_values.get("changes") or ())
    path = option_values.get("measured")
    if path is None:
        if option_values.get("measured_as"):
            raise ConfigError("--measured-as has no effect without --measured")
        return job
    return job._replace(anchor=_anchor(path, recorded or option_values))


def _plain_job(option_values: dict[str, Any]) -> "Job":
    from aorta.projection.whatif import Job

    model, plan, hardware = read(option_values)
    return Job(model, plan, hardware, factors_of(hardware))


def _anchor(path: Path, option_values: dict[str, Any]) -> "Anchor":
    """The anchor of --measured: its job is that of a row's file, or this one as far as the run's record and
    --measured-as say nothing else."""
    from aorta.projection.anchor import anchored, read_measured, settings_of_run

    measured, further = read_measured(path), list(option_values.get("measured_as") or ())
    if measured.run is None:
        command = main.commands["performance"]
        flags = command.make_context("measured", ["--job", str(path), *further]).params
    else:
        node = option_values["gpus_per_node"]
        named = {text.partition("=")[0].strip().lstrip("-").replace("-", "_") for text in further}
        known = settings_of_run(measured, node, named)
        known = [text for text in known if text.partition("=")[0] not in named]
        flags = flags_of([*known, *further], main.commands["performance"], option_values)
        if not named & {"global_batch_size"}:
            flags["global_batch_size"] = _recorded_batch(measured.tokens, flags)
    try:
        job = _plain_job(flags)
    except ConfigError as error:
        raise ConfigError(
            f"--measured {path}: {error}; --measured-as KEY=VALUE says what it ran with"
        ) from None
    return anchored(measured, job.model, job.plan, job.hardware, job.pricer())


def _recorded_batch(tokens: int | None, flags: dict[str, Any]) -> int | None:
    """Sequences of a recorded step by the tokens of one rank; None: one micro-batch a rank."""
    gpus = flags["nodes"] * flags["gpus_per_node"]
    ranks = gpus // (flags["tp"] * flags["pp"] * flags["cp"])
    if not tokens or not ranks:
        return None
    sequences = max(1, round(tokens * flags["cp"] / flags["seq_len"]))
    return int(sequences * ranks)


def _print(as_json: bool, result: dict[str, Any], text: Callable[[dict[str, Any]], str]) -> None:
    click.echo(msgspec.json.encode(result).decode() if as_json else text(result))
