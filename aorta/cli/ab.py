"""aorta ab: runs of two variants of a command in turn, until they are told apart."""

import subprocess
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

import click

from aorta.cli.options import NumberRange, json_option, matters_option, output_option
from aorta.command_line import OneScreenCommand
from aorta.errors import CANNOT_TELL, FINE, VIOLATED, ConfigError

if TYPE_CHECKING:
    from aorta.sweep.turns import Series, TurnRun


@click.command("ab", cls=OneScreenCommand, context_settings={"allow_interspersed_args": False})
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@click.option("--set", "setting", metavar="KEY=A,B", help="{KEY} in COMMAND is A or B.")
@click.option("--env", "variable", metavar="VAR=A,B", help="The variable is A or B; empty: not set.")
@click.option("--rev", "revisions", metavar="A,B", help="Run COMMAND at these git revisions.")
@click.option("-n", "most_pairs", type=click.IntRange(3, 500), default=20, help="Pairs at most; default: 20.")
@matters_option
@click.option("--minutes", type=NumberRange(0, min_open=True), default=60.0, help="Budget; default: 60.")
@click.option(
    "--metric",
    type=click.Choice(["step_ms", "p10_step_ms", "cpu_ms", "wall_s"]),
    default="step_ms",
    metavar="NAME",
    help="step_ms (default), p10_step_ms, cpu_ms, wall_s.",
)
@click.option("--timeout", type=NumberRange(0, min_open=True), default=1800.0, help="Seconds of one run.")
@output_option(file_okay=False, help="Folder; default: artifacts/ab/NUMBER.")
@json_option
def ab_command(
    command: tuple[str, ...],
    setting: str | None,
    variable: str | None,
    revisions: str | None,
    most_pairs: int,
    matters: float,
    minutes: float,
    metric: str,
    timeout: float,
    output: Path | None,
    as_json: bool,
) -> int:
    """Tell two variants of COMMAND apart: short runs in turn.

    aorta ab -n 20 --env OMP_NUM_THREADS=1,2 -- python train.py

    aorta ab -- python old.py -- python new.py

    Stops when B is slower, faster or the same within --matters: wrong in at most 5 % of series, whenever it
    stops. The same command goes on with an interrupted series. Exit code 1: B is slower, 3: cannot tell.
    """
    from aorta.account.results.schema import to_json
    from aorta.sweep.command import ended_by_sigterm, goes_on_later
    from aorta.sweep.turns import Series, run_series, summary_of, variants_of

    if sum(one is not None for one in (setting, variable, revisions)) > 1:
        raise ConfigError("--set, --env and --rev: give one of them, or two commands")
    identity = zlib.crc32("\0".join([*command, setting or "", variable or "", revisions or ""]).encode())
    folder = output or Path("artifacts") / "ab" / f"{identity:08x}"
    checkouts, names = _checkouts(revisions, folder.parent / f"{folder.name}-checkouts")
    variants = variants_of(command, setting, variable, checkouts, names)
    wanted = Series(variants, most_pairs, matters, identity, metric)

    def print_run(series: "Series", done: "TurnRun") -> None:
        if as_json:
            return
        number = series.most_pairs
        value = f"{done.wall_s:.1f} s" if done.step_ms is None else f"step {done.step_ms:.2f} ms"
        fault = (
            f"  failed: {done.failure}" if done.status != 0 else f"  {done.failure}" if done.failure else ""
        )
        click.echo(f"pair {done.pair + 1}/{number}  {done.variant}  {value}{fault}", err=True)

    with ended_by_sigterm(), goes_on_later():
        series = run_series(wanted, folder, timeout, 60 * minutes, print_run)
    outcome = series.look().outcome
    if as_json:
        click.echo(to_json(summary_of(series)).decode())
    else:
        click.echo("\n".join(answer(series)))
        click.echo(f"wrote {folder / 'ab.json'}")
    return {"slower": VIOLATED, "cannot tell": CANNOT_TELL}.get(outcome, FINE)


def answer(series: "Series") -> list[str]:
    """The verdict with its size, then the two sides and what failed."""
    from aorta.account.judge.sentences import percent
    from aorta.sweep.turns import shown

    now = series.look()
    a, b = (variant.name for variant in series.variants)
    what = {
        "step_ms": "step time",
        "p10_step_ms": "step time of the fastest tenth",
        "cpu_ms": "CPU time of a step",
    }.get(series.metric, "time of the command")
    change = "" if now.ratio is None else f": {what} {percent(now.ratio)}"
    if now.interval is not None:
        low, high = now.interval
        change += f" [{100 * (low - 1):+.1f}, {100 * (high - 1):+.1f}]"
    pairs = f"{now.num_pairs} pair{'s' * (now.num_pairs != 1)} of runs in turn"
    match now.outcome:
        case "same":
            head = f"{b} is as fast as {a} within {100 * series.matters:g} %{change}; {pairs}"
        case "cannot tell":
            head = f"cannot tell whether {b} differs from {a}{change}; {pairs}"
            if now.pairs_needed is not None:
                head += f"; about {max(now.pairs_needed, now.num_pairs + 1)} pairs would tell"
        case _:
            head = f"{b} is {now.outcome} than {a}{change}; {pairs}"
    lines = [head]
    for variant in series.variants:
        place = f" in {variant.folder}" if variant.folder else ""
        lines.append(f"{variant.name}: {shown(variant)}{place}")
    for variant in series.variants:
        failed, done = series.failed(variant), series.done(variant)
        if failed:
            lines.append(f"{variant.name} failed in {len(failed)} of {len(done)} runs: {failed[0].failure}")
    unread = [run for run in series.runs if run.status == 0 and run.failure]
    if unread:
        lines.append(
            f"{len(unread)} runs ended well and have no step time ({unread[0].failure});"
            " --metric wall_s compares whole commands"
        )
    spread = series.run_spread()
    if spread is not None:
        lines.append(
            f"runs of one side differ by {100 * spread:.2g} % (standard deviation):"
            " aorta compare --run-spread"
            f" {100 * spread:.2g}% judges single runs by it"
        )
    lines.append(
        "error rate: at most 5 % of series without a difference are called, whenever they stop; the interval"
        " allows for every look"
    )
    return lines


def _checkouts(revisions: str | None, folder: Path) -> tuple[list[Path], list[str]]:
    """Worktrees of two revisions of the repository here, and their names."""
    if revisions is None:
        return [], []
    names = revisions.split(",")
    if len(names) != 2 or names[0] == names[1] or not all(names):
        raise ConfigError(f"--rev {revisions}: must be two revisions, A,B")
    folders = []
    for side, revision in zip("AB", names, strict=True):
        place = (folder / side).resolve()
        if not place.exists():
            done = subprocess.run(
                ["git", "worktree", "add", "--detach", str(place), revision],
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode != 0:
                reason = (done.stderr.strip().splitlines() or ["git failed"])[-1]
                raise ConfigError(f"--rev {revision}: {reason}")
        folders.append(place)
    return folders, ["A", "B"]
