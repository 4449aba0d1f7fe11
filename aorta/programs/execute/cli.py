"""Commands compare and run of `aorta program`, under torchrun or as one process.

torch is imported when they run, so that --help does not wait for it.
"""

from typing import Any

import click

from aorta.command_line import option_group
from aorta.programs.cli import JSON, print_result
from aorta.programs.language.emit import DTYPE_NAMES, OPS

WRONG_EXIT = 1
"""Exit status of run where a result is wrong."""

sizes = option_group(
    click.option("--m", type=int, required=True, help="Rows of the whole product."),
    click.option("--n", type=int, required=True, help="Columns of the product on one rank."),
    click.option("--k", type=int, required=True, help="Inner size; split over ranks by gemm_rs and gemm_ar."),
    click.option("--dtype", type=click.Choice(DTYPE_NAMES), default="bf16", help="Type of the operands."),
    click.option("--rounds", "num_rounds", type=click.IntRange(min=8), default=30, help="Timed rounds."),
)
"""Options of both commands: shape and type of the problem, rounds."""


def numbers(context: click.Context, option: click.Parameter, text: str) -> tuple[int, ...]:
    """Numbers of a text such as 1,2,4 in ascending order, each once."""
    try:
        parsed = tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a list of numbers such as 1,2,4") from None
    if parsed[0] < 1:
        raise click.BadParameter(f"{parsed[0]} is less than 1")
    return parsed


@click.command("compare")
@click.option("--op", type=click.Choice(OPS), required=True, help="Collective around the multiply.")
@sizes
@click.option("--tiles", default="1,2,4,8,16", callback=numbers, help="Numbers of tiles to try.")
@click.option("--streams", default="1,2,4,8", callback=numbers, help="Numbers of worker streams to try.")
@JSON
def compare(op: str, tiles: tuple[int, ...], streams: tuple[int, ...], as_json: bool, **options: Any) -> None:
    """Measure orders and overlap strategies for one shape, and name the best.

    One process per GPU; without GPUs on gloo, where threads stand in for streams. torchrun takes --m for an
    abbreviation of its own unless it sees -- first: torchrun --nproc-per-node 2 -m -- aorta.host_ir compare …
    """
    import torch.distributed as dist

    from aorta.programs.execute.compare import compare as compare_strategies
    from aorta.programs.execute.compare import comparison_text
    from aorta.programs.execute.session import problem_of, ranks, refuse_long_multiply

    with ranks() as device:
        problem = problem_of(op, options)
        refuse_long_multiply(problem, device)
        comparison = compare_strategies(problem, device, tiles, streams, options["num_rounds"])
        is_first = dist.get_rank() == 0
    if is_first:  # after the group is closed: where nobody reads the output any more, no rank is left waiting
        print_result(as_json, comparison, lambda: comparison_text(comparison))


@click.command("run")
@click.argument("path", metavar="PROGRAM")
@sizes
@click.option("--unsafe", "is_unsafe", is_flag=True, help="Run a program that has a race.")
@JSON
def run(path: str, is_unsafe: bool, as_json: bool, **options: Any) -> int:
    """Run a program on streams (without GPUs on threads) and check its result. Exit code 1 if it is wrong.

    A program with a race is refused; --unsafe runs it and says in how many rounds its result agreed.
    """
    import torch.distributed as dist

    from aorta.programs.execute.run import run_program, run_text
    from aorta.programs.execute.session import ranks

    with ranks() as device:
        result = run_program(path, device, options, is_unsafe)
        is_first = dist.get_rank() == 0
    if is_first:
        print_result(as_json, result, lambda: run_text(result))
    return 0 if result.right else WRONG_EXIT
