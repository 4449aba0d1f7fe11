"""`aorta ab`: short runs of two variants in turn, until they are told apart or the budget is spent.

A machine that others use is faster in one minute than in the next. Two runs one after the other share the
minute, so their ratio is what counts, and which of the two comes first is drawn by lot. ab.json holds every
run that is done: the same command goes on where it stopped.
"""

import math
import os
import random
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from aorta.account.judge.judged import judge
from aorta.account.load.open import load_run
from aorta.account.load.rank.host import CPU
from aorta.command_line import module_environment
from aorta.errors import NOT_JSON, AortaError, ConfigError, RecordError
from aorta.files import read_regular
from aorta.records.writer import write_json
from aorta.timeline.sequential import Look, look
from aorta.timeline.statistics import ALPHA

DOCUMENT, LOG = "ab.json", "run.log"
WALL = "wall_s"
NO_TIMES: dict[str, float | None] = {"step_ms": None, "p10_step_ms": None, "cpu_ms": None}
GRACE_S = 20.0
"""Seconds that a run has to end after SIGTERM."""
MOST_FAILED = 2
"""First runs of a variant that fail, after which nothing more is tried."""
LAST_LINES = 400


class Variant(msgspec.Struct, frozen=True):
    """One of the two sides."""

    name: str
    command: list[str]
    environment: dict[str, str | None] = {}
    """Variables that it sets; null: not set."""
    folder: str | None = None
    """Where it runs, if not here."""


class TurnRun(msgspec.Struct, frozen=True):
    """One run that is done."""

    pair: int
    variant: str
    is_first: bool
    """Of its pair."""
    status: int
    """Exit status of the command; -1: out of time."""
    step_ms: float | None
    """Median of the judged steps; of a run that failed, or has too few steps, null."""
    p10_step_ms: float | None
    """A tenth of them are faster: what a step takes where nobody disturbs it."""
    cpu_ms: float | None
    """CPU time of the thread that trains, median of the judged steps; null where the record has none."""
    wall_s: float
    failure: str = ""
    """The first line of the output that tells of an error."""


class Series(msgspec.Struct):
    """ab.json."""

    variants: list[Variant]
    most_pairs: int
    matters: float
    seed: int
    metric: str
    runs: list[TurnRun] = []

    def log_ratios(self) -> list[float]:
        """Of the second variant over the first, by pair whose runs both have the metric."""
        ratios = []
        for pair in range(1 + max((run.pair for run in self.runs), default=-1)):
            values = {run.variant: self._value(run) for run in self.runs if run.pair == pair}
            both = [values.get(variant.name) for variant in self.variants]
            if both[0] and both[1]:
                ratios.append(math.log(both[1] / both[0]))
        return ratios

    def _value(self, run: TurnRun) -> float | None:
        values = {"step_ms": run.step_ms, "p10_step_ms": run.p10_step_ms, "cpu_ms": run.cpu_ms}
        return values.get(self.metric, run.wall_s if run.status == 0 else None)

    def run_spread(self) -> float | None:
        """Standard deviation between runs of one side, as a part; None for fewer than 3 runs of each."""
        sides = [
            [math.log(value) for run in self.done(variant) if (value := self._value(run))]
            for variant in self.variants
        ]
        if min(map(len, sides)) < 3:
            return None
        squares = sum(len(side) * float(np.var(side)) for side in sides)
        return math.sqrt(squares / (len(sides[0]) + len(sides[1]) - 2))

    def look(self) -> Look:
        return look(self.log_ratios(), self.most_pairs, self.matters, ALPHA)

    def failed(self, variant: Variant) -> list[TurnRun]:
        return [run for run in self.runs if run.variant == variant.name and run.status != 0]

    def done(self, variant: Variant) -> list[TurnRun]:
        return [run for run in self.runs if run.variant == variant.name]

    def is_hopeless(self) -> bool:
        """The first runs of a variant all failed, so that no pair will ever be whole."""
        return any(
            len(done) >= MOST_FAILED and all(run.status != 0 for run in done)
            for done in map(self.done, self.variants)
        )


OnRun = Callable[[Series, TurnRun], None]


def run_series(
    wanted: Series, folder: Path, timeout_s: float, budget_s: float, on_run: OnRun | None = None
) -> Series:
    """Do the runs that the folder lacks, until the series is decided, its pairs are done, or budget_s are
    spent by this call. Raises RecordError where the folder holds another series."""
    series = _opened(wanted, folder)
    started = time.monotonic()
    while not _is_over(series):
        pair, variant, is_first = _next(series)
        if time.monotonic() - started > budget_s:
            break
        done = _run(series, folder, pair, variant, is_first, timeout_s)
        series.runs.append(done)
        write_json(folder / DOCUMENT, msgspec.to_builtins(series))
        if on_run is not None:
            on_run(series, done)
    return series


def _is_over(series: Series) -> bool:
    num_runs = len(series.runs)
    return (
        num_runs >= 2 * series.most_pairs
        or series.is_hopeless()
        or (num_runs % 2 == 0 and series.look().is_decided)
    )


def _next(series: Series) -> tuple[int, Variant, bool]:
    """Pair, variant and whether it is the first of its pair. The order of a pair depends on the seed and its
    number alone, so that a series that goes on keeps it."""
    pair, place = divmod(len(series.runs), 2)
    order = list(series.variants)
    if random.Random(f"{series.seed} {pair}").random() < 0.5:
        order.reverse()
    return pair, order[place], place == 0


def _opened(wanted: Series, folder: Path) -> Series:
    path = folder / DOCUMENT
    if not path.exists():
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise RecordError(
                f"{folder} is not an empty folder and holds no {DOCUMENT}; give another --output"
            )
        folder.mkdir(parents=True, exist_ok=True)
        return wanted
    try:
        series = msgspec.json.decode(read_regular(path), type=Series)
    except (OSError, msgspec.ValidationError, *NOT_JSON) as error:
        raise RecordError(f"{path} cannot be read: {error}") from None
    if series.variants != wanted.variants:
        raise RecordError(f"{folder} holds a comparison of other commands; give another --output")
    # The level of the looks hangs on their number: what was begun with a budget ends with it.
    if (series.most_pairs, series.matters, series.metric) != (
        wanted.most_pairs,
        wanted.matters,
        wanted.metric,
    ):
        raise RecordError(
            f"{folder} was begun with -n {series.most_pairs}, --matters {100 * series.matters:g}% and"
            f" --metric {series.metric}: the error rate holds for these; give another --output to change them"
        )
    return series


def _run(
    series: Series, folder: Path, pair: int, variant: Variant, is_first: bool, timeout_s: float
) -> TurnRun:
    place = folder / f"pair-{pair:03d}-{variant.name}"
    number = 1
    while place.exists():  # left by an interrupted run
        place = folder / f"pair-{pair:03d}-{variant.name}-{number}"
        number += 1
    place.mkdir(parents=True)
    command = variant.command
    environment = dict(os.environ)
    if series.metric != WALL:
        command = [
            sys.executable,
            "-m",
            "aorta",
            "run",
            "--no-report",
            "-o",
            str(place.resolve()),
            "--",
            *command,
        ]
        environment = dict(module_environment())
    for name, value in variant.environment.items():
        environment.pop(name, None)
        if value is not None:
            environment[name] = value
    started = time.monotonic()
    with open(place / LOG, "wb") as log:
        try:
            process = subprocess.Popen(
                command,
                env=environment,
                cwd=variant.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches only this process, which then ends the run
            )
        except OSError as error:
            raise ConfigError(f"cannot run {variant.command[0]}: {error.strerror}") from None
        try:
            status = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            _end(process)
            status = -1
        except BaseException:
            _end(process)
            raise
    wall_s = time.monotonic() - started
    failure = ""
    times = dict(NO_TIMES)
    if status == -1:
        failure = f"took longer than {timeout_s:g} s (--timeout)"
    elif status != 0:
        line = first_failing_line(place / LOG)
        failure = f"exit status {status}: {line}" if line else f"exit status {status}"
    elif series.metric != WALL:
        times, failure = _steps(place)
    return TurnRun(pair, variant.name, is_first, status, wall_s=round(wall_s, 3), failure=failure, **times)


def _steps(folder: Path) -> tuple[dict[str, float | None], str]:
    """The times of a TurnRun over the judged steps, the middle of its ranks; or why there are none."""
    try:
        judged = judge(load_run(folder, "run"), None)
    except AortaError as error:
        return dict(NO_TIMES), str(error).splitlines()[0]
    step_ms = judged.values("step_ms")
    cpu_ms = judged.run.host_parts.get(CPU)
    busy = None if cpu_ms is None else _middle(np.nanmedian(cpu_ms[:, judged.num_warmup :], axis=1))
    return {
        "step_ms": judged.statistics["step_ms"].median,
        "p10_step_ms": _middle(np.nanpercentile(step_ms, 10, axis=1)),
        "cpu_ms": busy,
    }, ""


def _middle(of_ranks: NDArray[np.float64]) -> float | None:
    value = float(np.median(of_ranks))
    return value if math.isfinite(value) else None


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End the run with all that it started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
            return


def first_failing_line(log: Path) -> str:
    """The first line of the command's own output that names an error; the last line where none does."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith("aorta")]
    words = ("error", "exception", "abort", "fault", "killed", "assert", "traceback")
    named = [line for line in lines if any(word in line.lower() for word in words)]
    errors = [line for line in named if not line.startswith("Traceback")]
    chosen = (errors or named or lines[-1:] or [""])[0]
    return chosen[:LAST_LINES]


def variants_of(
    command: Sequence[str],
    setting: str | None = None,
    variable: str | None = None,
    revisions: Sequence[Path] = (),
    names: Sequence[str] = (),
) -> list[Variant]:
    """The two sides. setting, variable: KEY=A,B; revisions: the two checkouts, with their names."""
    if setting is None and variable is None and not revisions:
        if "--" not in command:
            raise ConfigError(
                "nothing differs between A and B: give two commands (-- A -- B), --set, --env or --rev"
            )
        place = list(command).index("--")
        sides = [list(command[:place]), list(command[place + 1 :])]
        if not all(sides):
            raise ConfigError("one of the two commands is empty: -- A -- B")
        return [Variant("A", sides[0]), Variant("B", sides[1])]
    if revisions:
        return [
            Variant(name, list(command), folder=str(folder))
            for name, folder in zip(names, revisions, strict=True)
        ]
    text = setting if setting is not None else variable
    assert text is not None
    option = "--set" if setting is not None else "--env"
    key, equals, rest = text.partition("=")
    values = rest.split(",")
    if not key or not equals or len(values) != 2 or values[0] == values[1]:
        raise ConfigError(f"{option} {text}: must be KEY=A,B with two values that differ")
    variants: list[Variant] = []
    for side, value in zip("AB", values, strict=True):
        if setting is None:
            variants.append(Variant(side, list(command), environment={key: value or None}))
            continue
        words = [word.replace(f"{{{key}}}", value) for word in command]
        variants.append(Variant(side, words if words != list(command) else [*words, f"{key}={value}"]))
    return variants


def shown(variant: Variant) -> str:
    """The variant as one would type it."""
    sets = [f"{name}={'' if value is None else value}" for name, value in variant.environment.items()]
    return " ".join([*map(shlex.quote, sets), shlex.join(variant.command)])


def summary_of(series: Series) -> dict[str, Any]:
    """What --json prints."""
    now = series.look()
    return {
        "outcome": now.outcome,
        "ratio": now.ratio,
        "interval": None if now.interval is None else list(now.interval),
        "matters": series.matters,
        "num_pairs": now.num_pairs,
        "most_pairs": series.most_pairs,
        "metric": series.metric,
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
