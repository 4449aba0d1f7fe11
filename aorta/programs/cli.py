"""`aorta program`, python -m aorta.host_ir: write, check and time the host side of overlapped loops.

Exit status of lint: 0 safe, 1 a race, 2 an error that the user can fix.
"""

import sys
from collections.abc import Callable
from typing import Any

import click
import msgspec

from aorta.command_line import LazyGroup, output_of_verdict
from aorta.programs.language.emit import COMMS, OPS, ORDERS, PLACES, TILE_ORDERS, Shape, emit
from aorta.programs.language.expr import HostProgramError
from aorta.programs.language.ir import Program
from aorta.programs.language.text import format_program, parse_program, read_program
from aorta.programs.simulator import QUEUE_MODELS, Costs, Machine, simulate

COMMANDS = {
    "compare": (
        "aorta.programs.execute.cli:compare",
        "Measure orders and strategies for a shape, under torchrun.",
    ),
    "emit": ("aorta.programs.cli:emit_command", "Print an overlapped multiply as a program."),
    "lint": ("aorta.programs.cli:lint_command", "Find races and needless waits in a program."),
    "run": ("aorta.programs.execute.cli:run", "Run a program under torchrun and check its result."),
    "simulate": (
        "aorta.programs.cli:simulate_command",
        "Predict the time of a program, and where it goes.",
    ),
}
"""Command -> (function, help). Two commands need torch, and are loaded when they are called."""

MACHINE = ("num_queues", "model", "wait_us", "comm_entry")
"""Options of simulate that are fields of Machine; the others are fields of Costs."""

RACE_EXIT = 1
"""Exit status of lint where it finds a race."""


@click.group(cls=LazyGroup, commands=COMMANDS, context_settings={"show_default": True})
def main() -> None:
    """Host programs: loops that overlap communication with compute, what serialises them, what it costs."""


PROGRAM = click.argument("path", metavar="PROGRAM")
JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")


@click.command("emit")
@click.option("--op", type=click.Choice(OPS), default="ag_gemm", help="Collective around the multiply.")
@click.option("--order", type=click.Choice(list(ORDERS)), help="Where fork and join stand, by name.")
@click.option("--fork", type=click.Choice(PLACES), help="Instead of --order; none plants a race.")
@click.option("--join", type=click.Choice(PLACES[:2]), help="Instead of --order.")
@click.option(
    "--tile-order",
    type=click.Choice(TILE_ORDERS),
    default="depth",
    help="breadth issues all communication first.",
)
@click.option("--tiles", "num_tiles", type=int, default=8, help="Pieces of the rows.")
@click.option("--streams", "num_streams", type=int, default=4, help="Worker streams.")
@click.option("--lanes", "num_lanes", type=int, default=1, help="Process groups.")
@click.option("--ranks", "num_ranks", type=int, default=2, help="Ranks that run the text.")
@click.option(
    "--comm",
    type=click.Choice(COMMS),
    default="collective",
    help="ring and pairwise send tiles, for ag_gemm.",
)
@click.option("--synchronous", is_flag=True, help="Collectives run on the worker stream itself.")
@click.option("--staging", "num_staging", type=int, help="Staging buffers of gemm_rs.")
def emit_command(
    order: str | None, fork: str | None, join: str | None, synchronous: bool, **shape_options: Any
) -> None:
    """Print an overlapped matrix multiply as a host program."""
    if order is not None and (fork is not None or join is not None):
        raise HostProgramError("--order already says where fork and join stand; give it or --fork and --join")
    places = ORDERS[order] if order is not None else (fork or "hoisted", join or "hoisted")
    shape = Shape(fork=places[0], join=places[1], asynchronous=not synchronous, **shape_options)  # type: ignore[arg-type]  # click checked the choices
    click.echo(format_program(emit(shape)), nl=False)


@click.command("lint")
@click.argument("paths", metavar="PROGRAM...", nargs=-1, required=True)
@JSON
@click.option("--all", "show_all", is_flag=True, help="Every edge, not the first of each kind.")
def lint_command(paths: tuple[str, ...], as_json: bool, show_all: bool) -> int:
    """Find missing and false dependencies of a program. Exit code 1 on a race.

    One PROGRAM for all ranks, or one per rank.
    """
    from aorta.programs import show
    from aorta.programs.lint.one_rank import lint

    verdict = lint(*(_program_of(path) for path in paths))
    print_result(as_json, verdict, lambda: show.lint_text(verdict, show_all))
    return 0 if verdict.is_safe else RACE_EXIT


@click.command("simulate")
@PROGRAM
@click.option("--comm-us", type=float, required=True, help="Time of one communication slice alone.")
@click.option("--gemm-us", type=float, required=True, help="Time of one GEMM slice alone.")
@click.option("--host-us", type=float, default=0.0, help="Host time per instruction.")
@click.option("--comm-slowdown", type=float, default=1.0, help="Factor on communication under compute.")
@click.option("--compute-slowdown", type=float, default=1.0, help="Factor on compute under communication.")
@click.option("--queues", "num_queues", type=int, help="Hardware queues; default: one per stream.")
@click.option("--queue-model", "model", type=click.Choice(QUEUE_MODELS), default="start-order")
@click.option(
    "--wait-us",
    type=float,
    default=0.0,
    help="Delay from an event to the stream that waits for it.",
)
@click.option(
    "--comm-entry",
    type=float,
    default=0.0,
    help="Share of a GEMM after which communication finds room beside it; 1: at its end.",
)
@click.option("--rank", type=int, default=0, help="Rank to simulate.")
@JSON
def simulate_command(path: str, rank: int, as_json: bool, **model_options: Any) -> None:
    """Predict the time of one rank: bounds, efficiency, where the time goes, timeline."""
    from aorta.programs import show
    from aorta.programs.bounds import predict

    program = _program_of(path)
    machine = Machine(**{key: model_options.pop(key) for key in MACHINE})
    costs = Costs(**model_options)
    prediction = predict(program, costs, machine, rank)
    ran = simulate(program, costs, machine, rank)
    print_result(as_json, prediction, lambda: show.prediction_text(prediction, ran))


def _program_of(path: str) -> Program:
    """The program in a file, or on standard input for `-`."""
    if path != "-":
        return read_program(path)
    try:
        return parse_program(sys.stdin.read(), "stdin")
    except UnicodeDecodeError:
        raise HostProgramError("stdin is not text") from None


def print_result(as_json: bool, result: msgspec.Struct, text: Callable[[], str]) -> None:
    with output_of_verdict():
        click.echo(msgspec.json.format(msgspec.json.encode(result)).decode() if as_json else text())
