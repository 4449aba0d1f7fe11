"""What is measured of one run: a metric of its report, a line of its output, a value of a file."""

import json
import math
import re
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from aorta.account.judge.judged import judge
from aorta.account.load.open import load_run
from aorta.account.load.rank.host import CPU
from aorta.account.metrics import MEANINGS, meaning, metric_key
from aorta.account.model import Run
from aorta.errors import AortaError, ConfigError, did_you_mean
from aorta.files import read_regular
from aorta.timeline.arrays import Floats

WALL = "wall_s"
OF_STEPS = ("p10_step_ms", "cpu_ms")
"""Beside the metrics of a report: the step that a tenth are faster than, and the CPU time of the thread that
trains."""
MOST_OUTPUT = 64 << 20
"""Bytes at the end of a run's output that are searched."""
MOST_FILE = 16 << 20


class RunMetric(msgspec.Struct, frozen=True):
    """A number of a run. Neither line nor file: wall_s, or a metric of the report."""

    name: str
    line: str | None = None
    """Regular expression; the first group of its last match in the output is the number."""
    file: str | None = None
    """JSON, relative to where the command runs; {run} in it is the run's folder."""
    key: str = ""
    """Of the file: names with dots between them."""

    @property
    def needs_records(self) -> bool:
        return self.line is None and self.file is None and self.name != WALL

    @property
    def unit(self) -> str:
        if self.name == WALL:
            return "s"
        if self.name in OF_STEPS:
            return "ms"
        return meaning(self.name).unit if self.needs_records else ""

    @property
    def better(self) -> str:
        """Which direction is: lower, higher or neither."""
        if self.name == WALL or self.name in OF_STEPS:
            return "lower"
        return meaning(self.name).better if self.needs_records else "neither"


def parsed_metric(text: str) -> RunMetric:
    """NAME, NAME=REGEX or NAME=@FILE:KEY. Raises ConfigError for what is none of them."""
    name, equals, rest = text.partition("=")
    if not equals:
        known = {WALL, *OF_STEPS, *MEANINGS}
        if metric_key(name).name not in known:
            hint = did_you_mean(name, known, f"; there is {WALL}, {', '.join(OF_STEPS)} or any of the report")
            raise ConfigError(f"--metric {text}: {name} is no metric{hint}")
        return RunMetric(name)
    if not name or not rest:
        raise ConfigError(f"--metric {text}: must be NAME, NAME=REGEX or NAME=@FILE:KEY")
    if rest.startswith("@"):
        file, colon, key = rest[1:].rpartition(":")
        if not colon or not file or not key:
            raise ConfigError(f"--metric {text}: a file needs a key: {name}=@FILE:KEY")
        return RunMetric(name, file=file, key=key)
    try:
        groups = re.compile(rest).groups
    except re.error as error:
        raise ConfigError(f"--metric {text}: {rest!r} is no regular expression: {error}") from None
    if groups != 1:
        raise ConfigError(f"--metric {text}: the expression needs one group in parentheses, the number")
    return RunMetric(name, line=rest)


def values_of_run(
    metrics: list[RunMetric], folder: Path, log: Path, workplace: Path, started_s: float, wall_s: float
) -> tuple[dict[str, float | None], str]:
    """Numbers by name, null where a run has none; and why the first of these has none.

    workplace: where the command ran. started_s: Unix time; a file that is older is of another run.
    """
    values: dict[str, float | None] = {WALL: round(wall_s, 3)}
    missing: list[str] = []
    judged: Run | AortaError | None = None
    for metric in metrics:
        if metric.name == WALL:
            continue
        value: float | None
        if metric.line is not None:
            value, reason = _of_output(metric.line, log)
        elif metric.file is not None:
            value, reason = _of_file(metric, workplace, folder, started_s)
        else:
            judged = _judged(folder) if judged is None else judged
            value, reason = _of_records(metric.name, judged)
        values[metric.name] = value
        if value is None:
            missing.append(f"{metric.name}: {reason}")
    return values, next(iter(missing), "")


def output_of(log: Path) -> str:
    """The end of a run's output."""
    with open(log, "rb") as file:
        file.seek(max(0, log.stat().st_size - MOST_OUTPUT))
        return file.read().decode(errors="replace")


def _of_output(expression: str, log: Path) -> tuple[float | None, str]:
    found = [match.group(1) for match in re.finditer(expression, output_of(log), re.MULTILINE)]
    return _finite(found[-1]) if found else (None, "no line of the output has it")


def _of_file(metric: RunMetric, workplace: Path, folder: Path, started_s: float) -> tuple[float | None, str]:
    assert metric.file is not None
    path = workplace / metric.file.replace("{run}", str(folder.resolve()))
    try:
        if path.stat().st_mtime < started_s - 1:
            return None, f"{path} is older than the run"
        found: Any = json.loads(read_regular(path, MOST_FILE))
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else "no JSON"
        return None, f"{path}: {reason}"
    for word in metric.key.split("."):
        if isinstance(found, dict) and word in found:
            found = found[word]
        elif isinstance(found, list) and word.lstrip("-").isdigit() and -len(found) <= int(word) < len(found):
            found = found[int(word)]
        else:
            return None, f"{path} has no {metric.key}"
    return _finite(found)


def _finite(found: Any) -> tuple[float | None, str]:
    try:
        value = float(found)
    except (TypeError, ValueError):
        return None, f"{str(found)[:40]!r} is no number"
    return (value, "") if math.isfinite(value) else (None, f"it is {value}")


def _judged(folder: Path) -> Run | AortaError:
    try:
        return judge(load_run(folder, "run"), None)
    except AortaError as error:
        return error


def _of_records(name: str, judged: Run | AortaError) -> tuple[float | None, str]:
    """Median over the judged steps, the middle of the ranks."""
    if isinstance(judged, AortaError):
        return None, str(judged).splitlines()[0]
    if name == "p10_step_ms":
        return _middle(np.nanpercentile(judged.values("step_ms"), 10, axis=1)), "no step was judged"
    if name == "cpu_ms":
        cpu_ms = judged.host_parts.get(CPU)
        if cpu_ms is None:
            return None, "the records have no CPU time"
        return _middle(np.nanmedian(cpu_ms[:, judged.judged_steps], axis=1)), "no step was judged"
    statistic = judged.statistics.get(name)
    if statistic is None or statistic.median is None:
        return None, judged.not_measured.get(name, f"not given by source {judged.source}")
    return statistic.median, ""


def _middle(of_ranks: Floats) -> float | None:
    value = float(np.median(of_ranks))
    return value if math.isfinite(value) else None
