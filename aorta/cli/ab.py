"""aorta ab: runs of two variants of a command in turn, until they are told apart."""

import math
import subprocess
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from aorta.cli.options import NumberRange, json_option, matters_option, output_option
from aorta.command_line import OneScreenCommand
from aorta.errors import BAD_INPUT, CANNOT_TELL, FINE, VIOLATED, ConfigError

if TYPE_CHECKING:
    from aorta.sweep.series import RoundRun, Series, Variant

OF_THE_STEP = ("step_ms", "cpu_ms")
"""Metrics whose change is that of a step, or of a step without the time that others had the cores."""
MOST_TAKEN_APART = 6
"""Rounds whose runs are read for it."""
metric_help = "step_ms (default), wall_s, others; NAME=REGEX."


@click.command("ab", cls=OneScreenCommand, context_settings={"allow_interspersed_args": False})
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@click.option("--set", "setting", metavar="KEY=A,B", help="{KEY} in COMMAND is A or B.")
@click.option("--env", "variable", metavar="VAR=A,B", help="The variable is A or B; empty: not set.")
@click.option("--rev", "revisions", metavar="A,B", help="Run COMMAND at these git revisions.")
@click.option(
    "--pairs", "-n", "most_pairs", type=click.IntRange(3, 500), default=20, help="Pairs at most; default: 20."
)
@matters_option
@click.option("--minutes", type=NumberRange(0, min_open=True), default=60.0, help="Budget; default: 60.")
@click.option("--metric", default="step_ms", metavar="NAME", help=metric_help)
@click.option(
    "--timeout-s",
    type=NumberRange(0, min_open=True),
    default=1800.0,
    help="Longest time of one run; default: 1800.",
)
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
    timeout_s: float,
    output: Path | None,
    as_json: bool,
) -> int:
    """Tell two variants of COMMAND apart: short runs in turn.

    aorta ab -n 20 --env OMP_NUM_THREADS=1,2 -- python train.py

    aorta ab -- python old.py -- python new.py

    Stops when B is slower, faster or the same within --matters: wrong in at most 5 % of series, whenever it
    stops. The same command goes on with an interrupted series. Exit code 1: B is slower, or fails alone; 2: A
    fails; 3: cannot tell.
    """
    from aorta.account.results.schema import to_json
    from aorta.sweep.metrics import parsed_metric
    from aorta.sweep.series import Series, goes_on_later, run_series

    if sum(one is not None for one in (setting, variable, revisions)) > 1:
        raise ConfigError("--set, --env and --rev: give one of them, or two commands")
    identity = zlib.crc32("\0".join([*command, setting or "", variable or "", revisions or ""]).encode())
    folder = output or Path("artifacts") / "ab" / f"{identity:08x}"
    if revisions is not None:
        variants = _of_revisions(command, revisions, folder.parent / f"{folder.name}-checkouts")
    else:
        variants = _variants(command, setting, variable)
    wanted = Series("ab", variants, most_pairs, matters, identity, [parsed_metric(metric)])
    with goes_on_later("ab"):
        series = run_series(
            wanted, folder, timeout_s, 60 * minutes, None if as_json else printing("pair", wanted)
        )
    outcome = series.look().outcome
    if as_json:
        click.echo(to_json(summary_of(series)).decode())
    else:
        click.echo("\n".join([*answer(series), *where(series, folder)]))
        click.echo(f"wrote {folder / series.document}")
    if hopeless := [variant.name for variant in series.hopeless()]:
        return BAD_INPUT if "A" in hopeless else VIOLATED
    return {"slower": VIOLATED, "cannot tell": CANNOT_TELL}.get(outcome, FINE)


def printing(word: str, wanted: "Series") -> "Callable[[Series, RoundRun], None]":
    """A line on stderr for each run that is done; word: what a round is called."""
    metric = wanted.metrics[0]

    def print_run(series: "Series", done: "RoundRun") -> None:
        value = done.values.get(metric.name)
        wall_s = done.values.get("wall_s")
        text = f"{metric.name} {value:.4g} {metric.unit}".rstrip() if value is not None else ""
        if value is None and wall_s is not None:
            text = f"{wall_s:.1f} s"
        fault = f"failed: {done.failure}" if done.is_failed else done.failure
        parts = "  ".join(filter(None, (done.variant, text, fault)))
        click.echo(f"{word} {done.round + 1}/{series.most_rounds}  {parts}", err=True)

    return print_run


def answer(series: "Series") -> list[str]:
    """The verdict with its size, then the two sides and what failed."""
    from aorta.account.judge.sentences import percent, percent_interval
    from aorta.account.model import ConfidenceInterval
    from aorta.sweep.series import shown
    from aorta.timeline.sequential import FIRST_LOOK

    now = series.look()
    a, b = (variant.name for variant in series.variants)
    metric = series.metrics[0]
    what = {
        "step_ms": "step time",
        "p10_step_ms": "step time of the fastest tenth",
        "cpu_ms": "CPU time of a step",
        "wall_s": "time of the command",
    }.get(metric.name, metric.name)
    change = "" if now.ratio is None or now.interval is None else f": {what} {percent(now.ratio)}"
    change += percent_interval(None if now.interval is None else ConfidenceInterval(*now.interval))
    pairs = f"{now.num_pairs} pair{'s' * (now.num_pairs != 1)} of runs in turn"
    is_time = metric.unit in ("ms", "s")
    match now.outcome:
        case "same":
            as_much = "as fast" if is_time else "the same"
            head = f"{b} is {as_much} as {a} within {100 * series.matters:g} %{change}; {pairs}"
        case "cannot tell":
            head = f"cannot tell whether {b} differs from {a}{change}; {pairs}"
            if now.num_pairs < FIRST_LOOK:
                head += f", {FIRST_LOOK} are the least that tell anything"
            elif now.pairs_needed is not None:
                needed = now.pairs_needed
                head += (
                    f"; series of {needed} pairs (-n {needed}) tell {100 * series.matters:g} % in nine of ten"
                )
        case _:
            word = now.outcome if is_time else {"slower": "higher", "faster": "lower"}[now.outcome]
            head = f"{b} is {word} than {a}{change}; {pairs}"
    if hopeless := series.hopeless():
        names = " and ".join(variant.name for variant in hopeless)
        head = f"there is nothing to compare: no run of {names} ended well"
    lines = [head]
    for variant in series.variants:
        place = f" in {variant.folder}" if variant.folder else ""
        lines.append(f"{variant.name}: {shown(variant)}{place}")
    for variant in series.variants:
        failed, done = series.failed(variant), series.done(variant)
        if failed:
            lines.append(f"{variant.name} failed in {len(failed)} of {len(done)} runs: {failed[0].failure}")
    unread = [run for run in series.runs if not run.is_failed and run.failure]
    if unread:
        advice = "; --metric wall_s compares whole commands" if metric.needs_records else ""
        lines.append(f"{len(unread)} runs ended well and have no value ({unread[0].failure}){advice}")
    spread = series.run_spread()
    if spread is not None:
        lines.append(f"runs of one side differ by {100 * spread[0]:.2g} % (standard deviation)")
    lines.append(
        "error rate: at most 5 % of series without a difference are called, whenever they stop; the interval"
        " allows for every look"
    )
    return lines


def where(series: "Series", folder: Path) -> list[str]:
    """The change of the step that was found, taken apart by cells and by phases with lines: shares of the
    steps that the runs recorded. [] where none was found, or not of steps."""
    import numpy as np

    from aorta.account.judge.decompose import Change, decompose
    from aorta.account.judge.judged import dataset, judge
    from aorta.account.load.open import load_run
    from aorta.errors import AortaError
    from aorta.page.table import taken_apart
    from aorta.sweep.series import STEP
    from aorta.timeline.noise import NORMAL_95

    now = series.look()
    metric = series.metrics[0]
    if now.outcome not in ("slower", "faster") or metric.name not in OF_THE_STEP or now.interval is None:
        return []
    names = [variant.name for variant in series.variants]
    sides = {}
    for number, name in enumerate(names):
        # An interrupted run left a folder of that name behind; the one that took its place is longer.
        places = [
            sorted(folder.glob(f"round-{one:03d}-{number:03d}*"))[-1:] for one in range(MOST_TAKEN_APART)
        ]
        try:
            runs = [judge(load_run(place, name), None) for found in places for place in found]
            sides[name] = dataset(name, runs)
        except AortaError:
            return []
    values = [value for value in series.values(STEP, series.variants[0]) if value is not None]
    low, high = map(math.log, now.interval)
    variance = ((high - low) / 2 / NORMAL_95) ** 2
    change = Change(float(np.median(values)), (low + high) / 2, variance, metric.name == "cpu_ms")
    apart = decompose(sides[names[0]], sides[names[1]], None, change)
    return ["", *taken_apart(apart, names[0], names[1]), ""]


def summary_of(series: "Series") -> dict[str, Any]:
    """What --json prints."""
    from aorta.sweep.series import shown

    now = series.look()
    return {
        "outcome": now.outcome,
        "ratio": None if now.interval is None else now.ratio,
        "interval": None if now.interval is None else list(now.interval),
        "matters": series.matters,
        "num_pairs": now.num_pairs,
        "most_pairs": series.most_rounds,
        "metric": series.metrics[0].name,
        "pairs_needed": now.pairs_needed,
        "variants": {
            variant.name: {
                "command": shown(variant),
                "folder": variant.folder,
                "num_runs": len(series.done(variant)),
                "num_failed": len(series.failed(variant)),
            }
            for variant in series.variants
        },
    }


# ---- the two sides -----------------------------------------------------------------------------


def _variants(command: Sequence[str], setting: str | None, variable: str | None) -> "list[Variant]":
    from aorta.sweep.matrix import check_variable, parsed_values, with_setting
    from aorta.sweep.series import Variant

    if setting is None and variable is None:
        if "--" not in command:
            raise ConfigError(
                "nothing differs between A and B: give two commands (-- A -- B), --set, --env or --rev"
            )
        place = list(command).index("--")
        sides = [list(command[:place]), list(command[place + 1 :])]
        if not all(sides):
            raise ConfigError("one of the two commands is empty: -- A -- B")
        return [Variant("A", sides[0]), Variant("B", sides[1])]
    option, text = ("--set", setting) if setting is not None else ("--env", variable)
    assert text is not None
    key, values = parsed_values(option, text)
    if len(values) != 2:
        raise ConfigError(f"{option} {text}: runs in turn have two values; `aorta sweep` takes more")
    if setting is not None:
        commands = [with_setting(command, key, value) for value in values]
        return [Variant(side, words) for side, words in zip("AB", commands, strict=True)]
    check_variable(key)
    return [
        Variant(side, list(command), {key: value or None}) for side, value in zip("AB", values, strict=True)
    ]


def _of_revisions(command: Sequence[str], revisions: str, folder: Path) -> "list[Variant]":
    """The command in worktrees of two revisions of the repository here."""
    from aorta.sweep.series import Variant

    names = revisions.split(",")
    if len(names) != 2 or names[0] == names[1] or not all(names):
        raise ConfigError(f"--rev {revisions}: must be two revisions, A,B")
    variants = []
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
        variants.append(Variant(side, list(command), folder=str(place)))
    return variants
