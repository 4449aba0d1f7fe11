"""Prometheus: --to prometheus=:9400, a page /metrics, or --to prometheus=DIR/aorta.prom, a file per rank.

One process per machine (exporter.py) reads the lines that the machine's ranks have written: one port to
scrape, and who waits for whom is known only where several ranks are seen. The training process starts it and
does no more.
"""

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from aorta.errors import ConfigError
from aorta.records.newest import FollowedRank
from aorta.records.schema import StepRecord
from aorta.records.state import SUMS, LinesState, RankState
from aorta.sinks.scalars import HELP, scalars
from aorta.sinks.sink import Place

if TYPE_CHECKING:  # the process that trains needs no account
    from aorta.account.newest import Newest, RankMeans

RANKS = "first of machine"
TAKES_RECORDS = False
PACKAGE = ""
LOOPBACK = "127.0.0.1"
CLOSES_WITHIN_S = 8.0
"""Limit of the wait for the last numbers of the machine's other ranks."""
UNITS = {"_ms": ("_seconds", 1e-3), "_w": ("_watts", 1.0), "_mhz": ("_hertz", 1e6), "_c": ("_celsius", 1.0)}
"""Base units, as Prometheus wants them, by the ending of a name."""


# ---- the target ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Address:
    host: str
    port: int
    """0: one that is free."""

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def read_target(target: str) -> Address | Path:
    """The address to listen at, on this machine alone where no host is given; or the file to write."""
    if target.isdecimal():
        raise ConfigError(f"--to prometheus={target}: give a port as :{target}, a file as ./{target}")
    match = re.fullmatch(r"(\[[0-9a-fA-F:.]*\]|[^/:]*):(\d+)", target)
    if match is None and ":" in target and "/" not in target:
        raise ConfigError(
            f"--to prometheus={target} is no address, such as :9400 or 0.0.0.0:9400; a file: ./{target}"
        )
    if match is None:
        return Path(target)
    host, port = match[1].strip("[]") or LOOPBACK, int(match[2])
    if port > 65535:
        raise ConfigError(f"--to prometheus={target}: a port is a number up to 65535")
    return Address(host, port)


check_target = read_target


def open_sink(target: str, place: Place) -> "Exporting":
    return Exporting(target, place)


class Exporting:
    """The process that exports, as long as this one records; it ends with this one however that ends."""

    def __init__(self, target: str, place: Place) -> None:
        options = {"target": target, "folder": str(place.folder), "world_size": place.world_size}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "aorta.sinks.exporter", json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # a Ctrl-C at the terminal is for the training processes
        )

    def add(self, record: StepRecord) -> None:
        """Do nothing: the process reads the lines."""

    def close(self) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(b"\n")  # a worker of a DataLoader may hold the pipe open
            self._process.stdin.close()
        except OSError:
            pass
        try:
            self._process.wait(CLOSES_WITHIN_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


# ---- the metrics ---------------------------------------------------------------------------------

OF_NEWEST: "tuple[tuple[str, str, Callable[[RankMeans], float | None]], ...]" = (
    ("exposed_wait_ms", "Exposed communication in which the rank waited for a later one, per step, mean of"
     " the newest 20 steps", lambda rank: rank.exposed_wait_ms),
    ("wait_caused_ms", "Exposed communication of the other ranks in which they waited for this one, per"
     " step, mean of the newest 20 steps and of these ranks", lambda rank: rank.caused_ms),
)  # fmt: skip
"""Name, meaning and value of the gauges that several ranks' steps tell."""

OF_ALL_STEPS: tuple[tuple[str, str, Callable[[LinesState], float | None]], ...] = (
    ("aorta_steps_total", "Steps of this attempt", lambda lines: lines.num_steps),
    ("aorta_tokens_total", "Tokens of this rank", lambda lines: lines.tokens or None),
    *(
        (f"aorta_{name.removesuffix('_ms')}_seconds_total", f"{HELP[name]}, sum of all steps",
         lambda lines, name=name: lines.sums[name] / 1e3 if name in lines.sums else None)
        for name in SUMS
    ),
)  # fmt: skip
"""Name, meaning and value of the counters, from the sums that a rank keeps of its steps."""


class Page:
    """A text in Prometheus' exposition format: the samples of a metric together, below its meaning."""

    def __init__(self) -> None:
        self._samples: dict[str, dict[str, float]] = {}
        self._heads: dict[str, str] = {}

    def add(self, name: str, kind: str, meaning: str, labels: Mapping[str, str], value: float) -> None:
        self._heads.setdefault(name, f"# HELP {name} {_escaped(meaning)}\n# TYPE {name} {kind}\n")
        named = ",".join(f'{label}="{_escaped(text, quotes=True)}"' for label, text in labels.items())
        # Two of a program's own scalars may have one name here: the first one counts.
        self._samples.setdefault(name, {}).setdefault(f"{name}{{{named}}}", value)

    def __str__(self) -> str:
        return "".join(
            head + "".join(f"{series} {value:.12g}\n" for series, value in self._samples[name].items())
            for name, head in self._heads.items()
        )


def page_of(
    job: str, states: Iterable[RankState], followed: Mapping[int, FollowedRank], shown: "Newest"
) -> str:
    """The metrics of the ranks of these states. followed, shown: all ranks that were read, also of other
    machines."""
    page = Page()
    means = {rank.rank: rank for rank in shown.ranks}
    for state in sorted(states, key=lambda state: state.rank):
        labels = {"job": job, "rank": str(state.rank), "world_size": str(state.process.world_size)}

        def gauge(name: str, meaning: str, value: float, labels: Mapping[str, str] = labels) -> None:
            unit_name, factor = _base_unit(name)
            page.add(f"aorta_{unit_name}", "gauge", meaning, labels, value * factor)

        def counter(name: str, meaning: str, value: float, labels: Mapping[str, str] = labels) -> None:
            page.add(name, "counter", meaning, labels, value)

        rank = followed.get(state.rank)
        if rank is not None and (last := rank.last) is not None:
            for name, value in scalars(last).items():
                gauge(name, HELP.get(name, f"{name} as logged by the program"), value)
            gauge("global_step", "Number of the last step", last.global_step)
            gauge(
                "step_start_timestamp_seconds", "Start of the last step, Unix time", last.start_unix_ns / 1e9
            )
            counter("aorta_collectives_total", "Collectives within steps", rank.num_collectives)
        if state.rank in means:
            for name, meaning, number in OF_NEWEST:
                if (mean := number(means[state.rank])) is not None:
                    gauge(name, meaning, mean)
            if len(means) > 1 and len(means) == state.process.world_size:
                is_late = shown.late is not None and shown.late.rank == state.rank
                gauge("straggler", "1 for the rank that the others wait for, 0 for the others", is_late)
        if state.lines is not None:
            for name, meaning, total in OF_ALL_STEPS:
                if (sum_ := total(state.lines)) is not None:
                    counter(name, meaning, sum_)
    return str(page)


def _base_unit(name: str) -> tuple[str, float]:
    """Name with its base unit, and the factor to it."""
    plain = "".join(letter if letter.isascii() and letter.isalnum() else "_" for letter in name)
    if plain == "tokens_per_s":
        return "tokens_per_second", 1.0
    for ending, (unit, factor) in UNITS.items():
        if plain.endswith(ending):
            return plain.removesuffix(ending) + unit, factor
    return plain, 1.0


def _escaped(text: str, quotes: bool = False) -> str:
    text = text.replace("\\", "\\\\").replace("\n", "\\n")
    return text.replace('"', '\\"') if quotes else text
