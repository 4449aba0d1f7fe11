"""python -m aorta.projection: what a training step should cost, without a GPU."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import msgspec

from aorta.command_line import OneLineGroup
from aorta.errors import ConfigError
from aorta.hardware import Hardware
from aorta.projection import show
from aorta.projection.memory import memory as memory_of
from aorta.projection.options import BACKEND_OPTIONS, PLAN_OPTIONS, options, read
from aorta.projection.plan import Plan
from aorta.projection.pricing import Pricer
from aorta.projection.step import project

JSON_OPTION = (click.option("--json", "as_json", is_flag=True, help="Print one JSON object."),)


@click.group(cls=OneLineGroup)
def main() -> None:
    """Step time, throughput and memory of LLM training from a model, a layout and a hardware file."""


@main.command()
@options(PLAN_OPTIONS, BACKEND_OPTIONS)
@click.option(
    "--profiling-mode",
    type=click.Choice(["simulate", "benchmark", "both"]),
    default="simulate",
    show_default=True,
)
@click.option(
    "--measurements", type=click.Path(path_type=Path), help="Measured layers of benchmark mode, JSON."
)
@click.option("--log-dir", type=click.Path(path_type=Path), help="Write the step as records, for the report.")
@options(JSON_OPTION)
def performance(**given: Any) -> None:
    """Step time, tokens per second and GPU, and where the time goes."""
    model, plan, hardware = read(given)
    mode, path = given["profiling_mode"], given["measurements"]
    if mode == "simulate" and path is not None:
        raise ConfigError("--measurements has no effect without --profiling-mode benchmark or both")
    if mode != "simulate" and path is None:
        raise ConfigError(f"--profiling-mode {mode} needs --measurements FILE")
    found = {}
    if mode != "benchmark":
        found["simulate"] = project(model, plan, pricer_of(given, hardware, plan))
    if mode != "simulate":
        from aorta.projection.benchmarked import measured_pricer

        found["benchmark"] = project(
            model, plan, measured_pricer(path, model, plan, pricer_of(given, hardware, plan))
        )
    used = memory_of(model, plan, hardware.memory.hbm_bytes)
    shown = {name: show.performance(projection, used) for name, projection in found.items()}
    if given["log_dir"] is not None:
        from aorta.projection.record import write_record

        projection = next(iter(found.values()))
        write_record(given["log_dir"], projection, pricer_of(given, hardware, plan))
    _print(given["as_json"], shown if mode == "both" else next(iter(shown.values())), show.performance_text)


@main.command()
@options(PLAN_OPTIONS, JSON_OPTION)
def memory(**given: Any) -> None:
    """Memory of the fullest rank, and whether it fits."""
    model, plan, hardware = read(given)
    used = memory_of(model, plan, hardware.memory.hbm_bytes)
    _print(given["as_json"], show.memory(used, model, plan, hardware), show.memory_text)


@main.command()
@options(PLAN_OPTIONS, BACKEND_OPTIONS)
@click.option("--ablation/--no-ablation", default=True, show_default=True, help="Step without each term.")
@options(JSON_OPTION)
def explain(**given: Any) -> None:
    """Every operation with its time, bound and source; the step without each term."""
    from aorta.projection import explain as explained

    model, plan, hardware = read(given)
    pricer = pricer_of(given, hardware, plan)
    found = explained.explain(model, plan, pricer, given["ablation"])
    _print(given["as_json"], found, explained.text)


@main.command()
@click.option("--data", required=True, type=click.Path(path_type=Path, file_okay=False))
@options(JSON_OPTION)
def validate(data: Path, as_json: bool) -> None:
    """Projected beside measured, misses included. Reads whichever known files the folder has."""
    from aorta.projection import validate as validation
    from aorta.projection import validate_text

    _print(as_json, validation.validate(data), validate_text.text)


@main.command()
@options(PLAN_OPTIONS[:2])
@click.option("--gpus", required=True, type=int)
@click.option("--gpus-per-node", type=int, default=8, show_default=True)
@click.option("--global-batch-size", required=True, type=int)
@click.option("--seq-len", type=int, default=4096, show_default=True)
@click.option("--dtype", type=click.Choice(["bf16", "fp8", "fp4"]), default="bf16", show_default=True)
@click.option("--stack", type=click.Choice(["eager", "compiled", "megatron"]), default="megatron")
@click.option("--top", type=int, default=15, show_default=True)
@options(JSON_OPTION)
def search(as_json: bool, **given: Any) -> None:
    """Legal layouts that fit into memory, fastest first, and the Pareto front of speed and memory."""
    from aorta.projection import search as searching

    found = searching.search(progress=not as_json, **given)
    _print(as_json, found, searching.text)


@main.command()
@click.option("--measurements", required=True, type=click.Path(path_type=Path, file_okay=False))
@click.option("--all-rows", is_flag=True, help="Fit on every row instead of the stated half.")
@options(JSON_OPTION)
def calibrate(measurements: Path, all_rows: bool, as_json: bool) -> None:
    """Fit the few factors above the kernels to measured steps; says how well they do on the other half."""
    from aorta.projection import calibrate as calibration

    _print(as_json, calibration.calibrate(measurements, all_rows), calibration.text)


def pricer_of(given: dict[str, Any], hardware: Hardware, plan: Plan) -> Pricer:
    """Kernel models by the names that were given."""
    table = given.get("gemm_table")
    return Pricer(
        hardware,
        plan,
        gemm_backend=given["gemm_backend"],
        sdpa_backend=given["sdpa_backend"],
        gemm_options={"path": table} if table else {},
    )


def _print(as_json: bool, result: dict[str, Any], text: Callable[[dict[str, Any]], str]) -> None:
    click.echo(msgspec.json.encode(result).decode() if as_json else text(result))
