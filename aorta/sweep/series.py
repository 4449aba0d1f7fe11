"""A series of runs: every variant of a command once in each round, in an order drawn by lot.

A machine that others use is faster in one minute than in the next. Runs of one round share the minutes, so
what they differ by counts, and which of them comes first is drawn. `aorta ab` does it with two variants and
stops when they are told apart; `aorta sweep` with the cells of a matrix, for a number of rounds. The
series' file holds every run that is done: the same command goes on where it stopped.
"""

import math
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
import psutil

from aorta.command_line import module_environment
from aorta.errors import NOT_JSON, ConfigError, RecordError
from aorta.files import read_regular
from aorta.records.secrets import redacted_command
from aorta.records.writer import write_json
from aorta.sweep.metrics import RunMetric, output_of, values_of_run
from aorta.timeline.sequential import Look, look
from aorta.timeline.statistics import ALPHA

LOG, PROCESS = "run.log", "process.json"
STEP = RunMetric("step_ms")
"""Noted of every run with records: what runs differ by is kept of it."""
GRACE_S = 45.0
"""Seconds that a run has to end after SIGTERM: torchrun gives ranks deaf to it 30 s."""
MOST_FAILED = 2
"""First runs of one of two variants that fail, after which nothing more is tried."""
LAST_LINES = 400
FAILURE_WORDS = ("error", "exception", "abort", "fault", "killed", "assert", "traceback")


class Variant(msgspec.Struct, frozen=True):
    """One of the sides, or cells."""

    name: str
    command: list[str]
    environment: dict[str, str | None] = {}
    """Variables that it sets; null: not set."""
    folder: str | None = None
    """Where it runs, if not here."""


class RoundRun(msgspec.Struct, frozen=True):
    """One run that is done."""

    round: int
    variant: str
    place: int
    """Its turn in the round, from 0."""
    status: int
    """Exit status of the command; -1: out of time."""
    values: dict[str, float | None]
    """Of each metric, and wall_s; null where the run failed, or has none."""
    failure: str = ""
    """The first line of the output that tells of an error; of a run that ended well, why a value is null."""
    is_failed: bool = False


class Series(msgspec.Struct):
    """ab.json and sweep.json."""

    kind: Literal["ab", "sweep"]
    variants: list[Variant]
    """The first is the reference."""
    most_rounds: int
    matters: float
    seed: int
    metrics: list[RunMetric]
    """The first decides when runs in turn stop."""
    fails_if: str | None = None
    """Regular expression: a run whose output has it has failed."""
    runs: list[RoundRun] = []

    @property
    def document(self) -> str:
        return f"{self.kind}.json"

    def values(self, metric: RunMetric, variant: Variant) -> list[float | None]:
        """By round; None for one that has no such number, or failed."""
        found: list[float | None] = [None] * self.most_rounds
        for run in self.done(variant):
            if not run.is_failed and run.round < self.most_rounds:
                found[run.round] = run.values.get(metric.name)
        return found

    def log_ratios(self) -> list[float]:
        """Of the second variant over the first, by round whose runs both have the first metric."""
        sides = [self.values(self.metrics[0], variant) for variant in self.variants[:2]]
        return [
            math.log(b / a)
            for a, b in zip(*sides, strict=True)
            if a is not None and b is not None and a > 0 and b > 0
        ]

    def run_spread(self, metric: RunMetric | None = None) -> tuple[float, int] | None:
        """Standard deviation of a metric (by default the first) between runs of one variant, as a part, and
        its degrees of freedom; None for fewer than 3 runs of each of two."""
        sides = []
        for variant in self.variants:
            values = [
                value for value in self.values(metric or self.metrics[0], variant) if value and value > 0
            ]
            if len(values) >= 3:
                sides.append(np.log(values))
        if len(sides) < 2:
            return None
        freedom = sum(map(len, sides)) - len(sides)
        return math.sqrt(sum(len(side) * float(np.var(side)) for side in sides) / freedom), freedom

    def look(self) -> Look:
        return look(self.log_ratios(), self.most_rounds, self.matters, ALPHA)

    def failed(self, variant: Variant) -> list[RoundRun]:
        return [run for run in self.done(variant) if run.is_failed]

    def done(self, variant: Variant) -> list[RoundRun]:
        return [run for run in self.runs if run.variant == variant.name]

    @property
    def is_over(self) -> bool:
        """All rounds are done; of runs in turn, they are decided, or never will be: a side fails."""
        num_runs = len(self.runs)
        if num_runs >= len(self.variants) * self.most_rounds:
            return True
        if self.kind == "sweep":
            return False
        return bool(self.hopeless()) or (num_runs % 2 == 0 and self.look().is_decided)

    def hopeless(self) -> list[Variant]:
        """Those of which no run ended well, once one of them has had enough."""
        failed = [
            variant
            for variant in self.variants
            if (done := self.done(variant)) and all(run.is_failed for run in done)
        ]
        return failed if any(len(self.done(variant)) >= MOST_FAILED for variant in failed) else []

    def next_run(self) -> tuple[int, Variant, int]:
        """Round, variant and its turn. The order of a round depends on the seed and its number alone, so that
        a series that goes on keeps it."""
        number, place = divmod(len(self.runs), len(self.variants))
        order = list(self.variants)
        random.Random(f"{self.seed} {number}").shuffle(order)
        return number, order[place], place


OnRun = Callable[[Series, RoundRun], None]


def run_series(
    wanted: Series, folder: Path, timeout_s: float, budget_s: float, on_run: OnRun | None = None
) -> Series:
    """Do the runs that the folder lacks, until the series is over or budget_s are spent by this call. Raises
    RecordError where the folder holds another series."""
    series = opened(wanted, folder)
    _end_left_behind(folder)
    # Before the first run: one that is interrupted in it goes on, too.
    write_json(folder / series.document, stored(series))
    started = time.monotonic()
    while not series.is_over:
        if time.monotonic() - started > budget_s:
            break
        number, variant, place = series.next_run()
        done = _run(series, folder, number, variant, place, timeout_s)
        series.runs.append(done)
        write_json(folder / series.document, stored(series))
        if on_run is not None:
            on_run(series, done)
    return series


def stored(series: Series) -> dict[str, object]:
    """What the series' file holds: commands and variables without secrets."""
    found: dict[str, object] = msgspec.to_builtins(series)
    found["variants"] = [msgspec.to_builtins(_without_secrets(variant)) for variant in series.variants]
    return found


def _without_secrets(variant: Variant) -> Variant:
    return msgspec.structs.replace(
        variant,
        command=redacted_command(variant.command),
        environment={
            name: None if value is None else redacted_command([f"{name}={value}"])[0].partition("=")[2]
            for name, value in variant.environment.items()
        },
    )


def opened(wanted: Series, folder: Path) -> Series:
    """The series that the folder holds, or the one wanted: of one that has no run yet nothing is kept."""
    path = folder / wanted.document
    if not path.exists():
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise RecordError(
                f"{folder} is not an empty folder and holds no {wanted.document}; give another --output"
            )
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RecordError(f"cannot write {folder}: {error.strerror}") from None
        return wanted
    try:
        series = msgspec.json.decode(read_regular(path), type=Series)
    except (OSError, msgspec.ValidationError, *NOT_JSON) as error:
        raise RecordError(f"{path} cannot be read: {error}") from None
    if not series.runs:
        return wanted
    if series.variants != [_without_secrets(variant) for variant in wanted.variants]:
        raise RecordError(f"{folder} holds a comparison of other commands; give another --output")
    given = [(one.most_rounds, one.matters, one.metrics, one.fails_if, one.seed) for one in (series, wanted)]
    # The level of the looks hangs on their number: what was begun with a budget ends with it.
    if given[0][:3] != given[1][:3] or given[0][3] != given[1][3]:
        names = ", ".join(metric.name for metric in series.metrics)
        raise RecordError(
            f"{folder} was begun with {series.most_rounds} rounds, --matters {100 * series.matters:g}% and"
            f" --metric {names}: the error rate holds for these; give another --output to change them"
        )
    return msgspec.structs.replace(series, variants=wanted.variants)


def _run(
    series: Series, folder: Path, number: int, variant: Variant, turn: int, timeout_s: float
) -> RoundRun:
    place = _new_folder(folder / f"round-{number:03d}-{series.variants.index(variant):03d}")
    command = [word.replace("{run}", str(place.resolve())) for word in variant.command]
    has_records = any(metric.needs_records for metric in series.metrics)
    if has_records:
        attach = [sys.executable, "-m", "aorta", "run", "--no-report", "-o", str(place.resolve()), "--"]
        command = [*attach, *command]
    workplace = Path(variant.folder or ".")
    started_s, started = time.time(), time.monotonic()
    status = _status(command, variant, place, folder, timeout_s)
    wall_s = time.monotonic() - started
    measured = [*series.metrics, *([STEP] if has_records and STEP not in series.metrics else [])]
    values: dict[str, float | None] = {metric.name: None for metric in measured}
    failure = ""
    is_failed = status != 0
    log = place / LOG
    if status == -1:
        failure = f"took longer than {timeout_s:g} s (--timeout-s)"
    elif status != 0:
        line = first_failing_line(log)
        failure = f"exit status {status}: {line}" if line else f"exit status {status}"
    elif series.fails_if is not None and (line := _line_with(series.fails_if, log)):
        failure, is_failed = line, True
    else:
        found, failure = values_of_run(measured, place, log, workplace, started_s, wall_s)
        values |= found
    values.setdefault("wall_s", None)
    return RoundRun(number, variant.name, turn, status, values, failure, is_failed)


def _new_folder(place: Path) -> Path:
    """An interrupted run leaves its folder, which stays."""
    found, number = place, 1
    while found.exists():
        found = place.with_name(f"{place.name}-{number}")
        number += 1
    found.mkdir(parents=True)
    return found


def _status(command: list[str], variant: Variant, place: Path, folder: Path, timeout_s: float) -> int:
    environment = dict(module_environment())
    for name, value in variant.environment.items():
        environment.pop(name, None)
        if value is not None:
            environment[name] = value
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
            raise ConfigError(f"cannot run {command[0]}: {error.strerror}") from None
        _note_process(folder, process.pid)
        try:
            return process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            _end(process)
            return -1
        except BaseException:
            _end(process)
            raise


def _note_process(folder: Path, pid: int) -> None:
    """What runs now, for a series that goes on after this process was killed."""
    with suppress(psutil.Error):
        write_json(folder / PROCESS, {"pid": pid, "started": psutil.Process(pid).create_time()})


def _end_left_behind(folder: Path) -> None:
    """End the run that a killed series left behind: it would go on beside the next one."""
    try:
        left = msgspec.json.decode(read_regular(folder / PROCESS), type=dict[str, float])
        pid = int(left["pid"])
        process = psutil.Process(pid)
        if process.create_time() == left["started"] and process.uids().real == os.getuid():
            os.killpg(pid, signal.SIGKILL)
    except (OSError, KeyError, ValueError, msgspec.MsgspecError, psutil.Error):
        return


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
    lines = [line.rstrip() for line in output_of(log).splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith("aorta")]
    named = [line for line in lines if any(word in line.lower() for word in FAILURE_WORDS)]
    # Lines of the program's source in a traceback are indented, also behind a launcher's [rank0]:
    named = [line for line in named if not re.match(r"(\[[^\]]*\]:? )?\s", line)] or named
    errors = [line for line in named if not line.startswith("Traceback")]
    chosen = (errors or named or lines[-1:] or [""])[0]
    return chosen.strip()[:LAST_LINES]


def _line_with(expression: str, log: Path) -> str:
    """The first line of the output in which the expression is found; '' where none has it."""
    for line in output_of(log).splitlines():
        if re.search(expression, line):
            return line.strip()[:LAST_LINES] or expression
    return ""


def shown(variant: Variant) -> str:
    """The variant as one would type it, without secrets."""
    variant = _without_secrets(variant)
    sets = [f"{name}={'' if value is None else value}" for name, value in variant.environment.items()]
    return " ".join([*map(shlex.quote, sets), shlex.join(variant.command)])


@contextmanager
def goes_on_later(name: str) -> Iterator[None]:
    """Context that tells the user, on Ctrl-C, that finished runs are kept, and ends the one that runs on
    SIGTERM too."""

    def leave(number: int, _: object) -> None:
        sys.exit(128 + number)

    previous = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    except KeyboardInterrupt:
        print(f"{name}: interrupted; run the same command again to continue", file=sys.stderr)
        raise
    finally:
        signal.signal(signal.SIGTERM, previous)
