"""aorta sweep: a matrix of settings, environments and words before a command, with trials."""

import zlib
from pathlib import Path
from typing import TYPE_CHECKING

import click

from aorta.cli.ab import metric_help, printing
from aorta.cli.options import PATH, NumberRange, Share, json_option, output_option
from aorta.command_line import OneScreenCommand, output_of_verdict, rare
from aorta.errors import FINE, VIOLATED, ConfigError

if TYPE_CHECKING:
    from aorta.sweep.series import Variant


@click.command("sweep", cls=OneScreenCommand, context_settings={"allow_interspersed_args": False})
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@click.option("--set", "settings", multiple=True, metavar="KEY=A,B,..", help="{KEY} in COMMAND takes each.")
@click.option("--env", "variables", multiple=True, metavar="VAR=A,B,..", help="A variable; empty: not set.")
@click.option(
    "--bundle", "bundles", multiple=True, metavar="NAME:VAR=A,..", help="Variables together; may repeat."
)
@click.option("--prefix", "prefixes", multiple=True, metavar="NAME=WORDS", help="Words before COMMAND.")
@click.option("--recipe", type=PATH, help="YAML of all this; also of ROCm/aorta.")
@click.option("--trials", type=click.IntRange(1, 1000), help="Runs of each cell; default: 3.")
@click.option("--metric", "metrics", multiple=True, metavar="NAME", help=metric_help)
@click.option("--baseline", metavar="CELL", help="Compare with this cell; default: the first.")
@click.option("--list", "only_list", is_flag=True, help="List the cells and run none.")
@output_option(file_okay=False, help="Folder; default: artifacts/sweep/NUMBER.")
@json_option
@rare(
    "--matters", type=Share(), metavar="PERCENT", section="Rules", help="Smallest change that matters (3%)."
)
@rare("--fails-if", metavar="REGEX", section="Rules", help="A run whose output has it has failed.")
@rare(
    "--timeout-s",
    type=NumberRange(0, min_open=True),
    section="Rules",
    help="Longest time of one run (1800).",
)
@rare("--minutes", type=NumberRange(0, min_open=True), section="Rules", help="Budget of this call.")
def sweep_command(
    command: tuple[str, ...],
    settings: tuple[str, ...],
    variables: tuple[str, ...],
    bundles: tuple[str, ...],
    prefixes: tuple[str, ...],
    recipe: Path | None,
    trials: int | None,
    metrics: tuple[str, ...],
    baseline: str | None,
    only_list: bool,
    output: Path | None,
    as_json: bool,
    matters: float | None,
    fails_if: str | None,
    timeout_s: float | None,
    minutes: float | None,
) -> int:
    """Run COMMAND under every combination, several times: what each does, and how often it fails.

    aorta sweep --env OMP_NUM_THREADS=1,2 --set lr=1e-3,1e-4 -- python train.py --lr={lr}

    Runs take turns in an order drawn by lot; every cell is compared with the baseline. The same command
    goes on with an interrupted matrix. Exit code 1: a cell fails more often than the
    baseline, or all of its runs do.
    """
    import shlex

    from aorta.account.results.schema import to_json
    from aorta.sweep import matrix
    from aorta.sweep.effects import results_of
    from aorta.sweep.series import Series, goes_on_later, run_series
    from aorta.sweep.table import table_lines

    given, notes = (matrix.Recipe(), []) if recipe is None else matrix.load_recipe(recipe)
    axes = matrix.axes_of(given)
    for text in settings:
        axes.append(matrix.setting_axis(*matrix.parsed_values("--set", text)))
    for text in variables:
        name, values = matrix.parsed_values("--env", text)
        axes.append(matrix.variable_axis(name, [value or None for value in values]))
    if bundles:
        axes.append(matrix.environment_axis(_named(bundles, matrix.parsed_bundle)))
    if prefixes:
        axes.append(matrix.prefix_axis(_named(prefixes, matrix.parsed_prefix)))
    words = list(command) or (
        shlex.split(given.command) if isinstance(given.command, str) else list(given.command)
    )
    cells = matrix.with_baseline_first(matrix.cells_of(axes, words), baseline or given.baseline)
    if fails_if is not None:
        matrix.check_expression("--fails-if", fails_if)
    identity = zlib.crc32(repr([(cell.name, cell.command) for cell in cells]).encode())
    folder = output or Path("artifacts") / "sweep" / f"{identity:08x}"
    wanted = Series(
        "sweep",
        cells,
        trials or given.trials,
        given.matters / 100 if matters is None else matters,
        identity,
        matrix.metrics_of(metrics or given.metrics),
        fails_if or given.fails_if,
    )
    for note in notes:
        click.echo(f"sweep: {note}", err=True)
    if only_list:
        for cell in cells:
            click.echo(_listed(cell))
        click.echo(f"{len(cells)} cells x {wanted.most_rounds} trials")
        return FINE
    budget_s = float("inf") if minutes is None else 60 * minutes
    with goes_on_later("sweep"):
        series = run_series(
            wanted,
            folder,
            timeout_s or given.timeout_s,
            budget_s,
            None if as_json else printing("trial", wanted),
        )
    slower_by = None if given.slower_by is None else given.slower_by / 100
    results = results_of(series, slower_by)
    (folder / "results.json").write_bytes(to_json(results) + b"\n")
    with output_of_verdict():
        if as_json:
            click.echo(to_json(results).decode())
        else:
            click.echo("\n".join(table_lines(series, results)))
            click.echo(f"wrote {folder / 'results.json'}")
    is_bad = any(
        result.failures.verdict == "fails more often"
        or (result.failures.num_failed == result.failures.num_runs > 0)
        for result in results
    )
    return VIOLATED if is_bad else FINE


def _named(texts: tuple[str, ...], parse):  # type: ignore[no-untyped-def]
    """What each text says, by its name; ConfigError for a name that stands twice."""
    found = {}
    for text in texts:
        name, value = parse(text)
        if name in found:
            raise ConfigError(f"{name} is given twice")
        found[name] = value
    return found


def _listed(cell: "Variant") -> str:
    from aorta.sweep.series import shown

    return f"{cell.name}: {shown(cell)}"
