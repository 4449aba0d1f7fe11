"""A text file for node_exporter's textfile collector: --to prometheus=DIR/aorta.prom.

Each rank writes a file of its own (aorta_rank0.prom), replaced whole after each step at most once a second. A
Grafana dashboard for it is in docs/grafana/.
"""

import os
import time
from pathlib import Path

from aorta.records.schema import StepRecord
from aorta.sinks.scalars import HELP, scalars

EVERY_RANK = True
PACKAGE = ""
WRITE_EVERY_S = 1.0
"""Shortest time between two writings of the file."""
UNITS = {"_ms": ("_seconds", 1e-3), "_w": ("_watts", 1.0), "_mhz": ("_hertz", 1e6), "_c": ("_celsius", 1.0)}
"""Base units, as Prometheus wants them, by the ending of a name."""


def open_sink(target: str, rank: int, world_size: int) -> "PrometheusFile":
    path = Path(target)
    path.parent.mkdir(parents=True, exist_ok=True)
    return PrometheusFile(path.with_name(f"{path.stem}_rank{rank}{path.suffix or '.prom'}"), rank, world_size)


class PrometheusFile:
    """Gauges of the last step, and counters of steps and collectives."""

    def __init__(self, path: Path, rank: int, world_size: int) -> None:
        self.path = path
        self._labels = f'{{rank="{rank}",world_size="{world_size}"}}'
        self._num_steps = 0
        self._num_collectives = 0
        self._step_s = 0.0
        self._exposed_s = 0.0
        self._last: StepRecord | None = None
        self._written_s = -WRITE_EVERY_S

    def add(self, record: StepRecord) -> None:
        self._num_steps += 1
        self._num_collectives += record.num_collectives
        self._step_s += (record.step_ms or 0.0) / 1e3
        self._exposed_s += (record.overlap.exposed_ms or 0.0) / 1e3
        self._last = record
        if time.monotonic() - self._written_s >= WRITE_EVERY_S:
            self._write(record)

    def close(self) -> None:
        if self._last is not None:
            self._write(self._last)

    def _write(self, record: StepRecord) -> None:
        self._written_s = time.monotonic()
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        temporary.write_text("".join(self.lines(record)))
        temporary.replace(self.path)

    def lines(self, record: StepRecord) -> list[str]:
        """Text of the file in Prometheus' exposition format."""
        lines: list[str] = []

        def metric(name: str, kind: str, text: str, value: float) -> None:
            lines.append(f"# HELP {name} {text}\n# TYPE {name} {kind}\n{name}{self._labels} {value:.10g}\n")

        for name, value in scalars(record).items():
            unit_name, factor = _base_unit(name)
            metric(
                f"aorta_{unit_name}",
                "gauge",
                HELP.get(name, f"{name} as logged by the program"),
                value * factor,
            )
        metric("aorta_global_step", "gauge", "Number of the last step", record.global_step)
        metric("aorta_steps_total", "counter", "Steps of this run", self._num_steps)
        metric("aorta_collectives_total", "counter", "Collectives within steps", self._num_collectives)
        metric("aorta_step_seconds_total", "counter", "Length of all steps of this run", self._step_s)
        metric(
            "aorta_exposed_seconds_total", "counter", "Exposed communication of all steps", self._exposed_s
        )
        metric("aorta_step_start_timestamp_seconds", "gauge", "Start of the last step, Unix time",
               record.start_unix_ns / 1e9)  # fmt: skip
        return lines


def _base_unit(name: str) -> tuple[str, float]:
    """Name with its base unit, and the factor to it."""
    plain = "".join(letter if letter.isascii() and letter.isalnum() else "_" for letter in name)
    if plain == "tokens_per_s":
        return "tokens_per_second", 1.0
    for ending, (unit, factor) in UNITS.items():
        if plain.endswith(ending):
            return plain.removesuffix(ending) + unit, factor
    return plain, 1.0
