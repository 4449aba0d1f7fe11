"""Kernels by class, and names of kernels that fit a line."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from aorta.records.schema import StepRecord
from aorta.report.metrics import of_operation
from aorta.report.model import Dataset
from aorta.report.numbers import number, percent, quantity
from aorta.traces.kernel_classes import KERNEL_CLASSES

TIME, COUNT = "kernel_ms", "kernel_count"
"""Metrics of each class of kernels: kernel_ms.gemm, kernel_count.gemm."""


@dataclass(frozen=True, slots=True)
class KernelRow:
    """Kernels of one class or name in a step: the sum of their times, which may run at once."""

    name: str
    time_ms: float
    count: float


def kernel_rows(classes: Mapping[str, tuple[float, float]]) -> list[KernelRow]:
    """From class or kernel name -> (ms, count) of a step; what takes longest comes first."""
    rows = [KernelRow(name, time_ms, count) for name, (time_ms, count) in classes.items() if count > 0]
    return sorted(rows, key=lambda row: (-row.time_ms, row.name))


def of_kernels(record: StepRecord) -> Iterator[tuple[str, float]]:
    """What a line of kernel records says of every class; a class without kernels took 0 ms."""
    if record.kernels is None:
        return
    for name in KERNEL_CLASSES:
        time_ms, count = record.kernels.classes.get(name, (0.0, 0))
        yield of_operation(TIME, name), time_ms
        yield of_operation(COUNT, name), float(count)


def kernels_of_dataset(dataset: Dataset) -> tuple[list[KernelRow], float | None]:
    """Medians by class, and that of the step; no row where the source does not tell kernels apart."""
    classes: dict[str, tuple[float, float]] = {}
    for name in KERNEL_CLASSES:
        pair = [dataset.statistics.get(of_operation(kind, name)) for kind in (TIME, COUNT)]
        time_ms, count = (None if statistic is None else statistic.median for statistic in pair)
        if time_ms is not None and count is not None:
            classes[name] = (time_ms, count)
    step = dataset.statistics.get("step_ms")
    return kernel_rows(classes), None if step is None else step.median


def kernel_table(rows: list[KernelRow], step_ms: float | None) -> str:
    """Time, share of the step and number of launches, aligned for a terminal."""
    cells = [("kernels", "time", "of step", "launches", "mean")]
    for row in rows:
        share = percent(row.time_ms / step_ms) if step_ms else "n/a"
        mean = f"{number(1e3 * row.time_ms / row.count)} us" if row.count else "n/a"
        count = f"{row.count:,.0f}" if row.count == int(row.count) else number(row.count)
        cells.append((kernel_name(row.name), quantity(row.time_ms, "ms"), share, count, mean))
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    return "\n".join(
        "   ".join(
            [line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True))]
        )
        for line in cells
    )


def kernel_name(name: str, max_letters: int = 60) -> str:
    """A kernel's own name without namespaces, parameters and template arguments, but with the functor that
    tells element-wise kernels apart: 'vectorized_elementwise_kernel (FillFunctor)'."""
    plain = re.sub(r"\(anonymous namespace\)::", "", name.strip())
    head = _without_arguments(plain)
    last_part = re.split(r"::", head.split()[-1])[-1] if head.split() else plain
    functors = re.findall(r"\b(\w*[Ff]unctor\w*)\b", plain[len(last_part) :]) if "<" in plain else []
    functors = [word for word in functors if word not in last_part]
    text = f"{last_part} ({functors[0]})" if functors else last_part
    return text if len(text) <= max_letters else f"{text[: max_letters - 1]}\u2026"


def _without_arguments(name: str) -> str:
    """What is outside of < > and before a parameter list."""
    depth = 0
    outer: list[str] = []
    for letter in name:
        if letter == "<":
            depth += 1
        elif letter == ">":
            depth = max(0, depth - 1)
        elif depth == 0:
            if letter == "(" and outer:
                break
            outer.append(letter)
    return "".join(outer)
