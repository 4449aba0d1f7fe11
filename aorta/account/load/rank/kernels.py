"""Kernels by class, and names of kernels that fit a line."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from aorta.account.metrics import of_operation, operations
from aorta.account.model import Comparison, Dataset, MetricComparison, NamedSpan
from aorta.account.numbers import number, percent, quantity
from aorta.records.schema import KERNEL_CLASSES, StepRecord
from aorta.records.table import StepTable, TopKernels
from aorta.timeline.arrays import Floats, Ints
from aorta.traces.classify import COMM_RULES, classifier

TIME, COUNT = "kernel_ms", "kernel_count"
"""Metrics of each class of kernels: kernel_ms.gemm, kernel_count.gemm."""
NAME_TIME, NAME_COUNT = "kernel_name_ms", "kernel_name_count"
"""Metrics of the kernels of a name, as kernel_name gives it, that take most time."""
COPY_TIME = "copy_ms"
"""Metric of copies by what they are from and to: copy_ms.pageable_to_device."""
GRAPH_NODES = "graph_nodes"
"""Kernels and copies of a step that were nodes of CUDA graphs."""
GRAPH_NODE_US = 0.5
"""What the record of a node costs the device at most: 0.47 to 0.52 beside kernels of 1 us on H200."""
MOST_NAMES = 12
"""Names with metrics of their own, of each rank."""
MOST_LETTERS = 60
_TOLD = r"\b(\w*[Ff]unctor\w*|direct_copy_kernel\w*|cutlass_\w+)\b"
"""Arguments of a template that tell its kernels apart."""
IN_FP64 = re.compile(r"[Ff]unctor\w*<double\b|kernel\w*<double\b|_forward<double\b|_backward<double\b")
"""Types that a kernel computes in; others have arguments of this type too."""
_SHORT = re.compile(rf"\w+ \(({_TOLD}|double)\)")


@dataclass(frozen=True, slots=True)
class KernelTimeRow:
    """Kernels of one class or name in a step: the sum of their times, which may run at once."""

    name: str
    time_ms: float
    count: float
    """Launches; calls of an operator."""
    is_operator: bool = False
    """The name is an operator's with its shapes, and is shown as it is."""
    achieved: str = ""
    """'412 TFLOP/s'; '' where the work is not known."""
    of_attainable: float | None = None
    """Least time on this device over the time taken; None where it is not known."""

    @property
    def title(self) -> str:
        return self.name if self.is_operator else kernel_name(self.name)


def kernel_rows(classes: Mapping[str, tuple[float, float]]) -> list[KernelTimeRow]:
    """Rows from class or kernel name -> (ms, count) of a step, the longest first."""
    rows = [KernelTimeRow(name, time_ms, count) for name, (time_ms, count) in classes.items() if count > 0]
    return sorted(rows, key=lambda row: (-row.time_ms, row.name))


def graph_text(dataset: Dataset) -> str:
    """What kernel records cost where CUDA graphs are replayed; '' where none are."""
    nodes, step = (dataset.statistics.get(name) for name in (GRAPH_NODES, "step_ms"))
    if nodes is None or not nodes.median:
        return ""
    cost_ms = nodes.median * GRAPH_NODE_US / 1e3
    of_step = "" if step is None or not step.median else f", {percent(cost_ms / step.median, digits=1)} of it"
    return (
        f"CUDA graphs: {nodes.median:,.0f} kernels and copies of a step are nodes of graphs, whose records"
        f" take up to {GRAPH_NODE_US} us of the device each"
        f" ({quantity(cost_ms, 'ms')} a step at most{of_step}); --overhead bounds that"
    )


def kernel_metrics(block: StepTable) -> dict[str, Floats]:
    """Metrics of every class in lines of kernel records, NaN in other lines; a class without kernels took
    0 ms."""
    num_graph_nodes = block.numbers("kernels.num_graph_nodes")
    if num_graph_nodes is None:
        return {}
    rows = np.flatnonzero(block.has("kernels"))
    metrics = {}
    for class_name in KERNEL_CLASSES:
        for metric, values in zip((TIME, COUNT), block.kernel_class(class_name), strict=True):
            metrics[of_operation(metric, class_name)] = column = np.full(len(block), np.nan)
            column[rows] = values
    metrics |= {of_operation(COPY_TIME, kind): ms for kind, ms in block.copies().items()}
    return metrics | {GRAPH_NODES: num_graph_nodes}


class NamedKernels:
    """Collects what the lines of one rank say of kernels by name."""

    def __init__(self) -> None:
        self._lines: list[Ints] = []
        """Rows that have kernels."""
        self._kernels: list[TopKernels] = []

    def add(self, first_row: int, block: StepTable) -> None:
        """Notes the kernels of neighbouring rows, of those that have any."""
        rows = np.flatnonzero(block.has("kernels"))
        if len(rows):
            kernels = block.top_kernels()
            self._lines.append(rows + first_row)
            self._kernels.append(kernels._replace(row=kernels.row + first_row))

    def columns(self, names: Sequence[str], num_rows: int) -> dict[str, Floats]:
        """kernel_name_ms.<name> and kernel_name_count.<name> of the names that took most time in all.

        NaN in rows that do not tell: a line lists the names with most time, so that one which is absent from
        a list that is not all took an unknown time, and none otherwise.
        """
        if not self._kernels:
            return {}
        row, ids, ms, counts, is_complete_line = map(np.concatenate, zip(*self._kernels, strict=True))
        lines = np.concatenate(self._lines)
        is_named = (ids >= 0) & (ids < len(names))
        if not is_named.any():
            return {}
        short_names = [kernel_name(name, 2 * MOST_LETTERS) for name in names]
        labels = sorted({*short_names})
        place_of = {label: place for place, label in enumerate(labels)}
        label_of_id = np.array([place_of[name] for name in short_names])
        row, ids, ms, counts = (column[is_named] for column in (row, ids, ms, counts))
        num_members = np.bincount(label_of_id[np.bincount(ids, minlength=len(names)) > 0], None, len(labels))
        label = label_of_id[ids]
        longest = np.argsort(-np.bincount(label, ms, len(labels)), kind="stable")[:MOST_NAMES]
        has_kernels, is_complete = np.zeros(num_rows, dtype=bool), np.zeros(num_rows, dtype=bool)
        has_kernels[lines] = True
        is_complete[lines] = is_complete_line
        columns: dict[str, Floats] = {}
        for place in longest.tolist():
            if not num_members[place]:
                continue
            chosen = label == place
            is_known = is_complete | (np.bincount(row[chosen], minlength=num_rows) == num_members[place])
            for metric, values in ((NAME_TIME, ms), (NAME_COUNT, counts)):
                sums = np.bincount(row[chosen], values[chosen], num_rows)
                columns[of_operation(metric, labels[place])] = np.where(has_kernels & is_known, sums, np.nan)
        return columns


def named_spans(record: StepRecord, names: Sequence[str]) -> list[NamedSpan]:
    """The kernels of a line that are not communication, where it keeps every kernel."""
    spans = [] if record.kernels is None else record.kernels.spans or []
    rules = classifier(COMM_RULES)
    return [
        (span.start_ms, span.start_ms + span.duration_ms, kernel_name(names[span.name]))
        for span in spans
        if 0 <= span.name < len(names) and rules.comm_op(names[span.name]) is None
    ]


def compared_kernels(comparison: Comparison) -> Iterator[tuple[str, MetricComparison, str]]:
    """Kernels by class, then by name, each with its time and with its launches where they differ; what
    changed most comes first."""
    for time, count in ((TIME, COUNT), (NAME_TIME, NAME_COUNT)):
        rows = [
            (name, metric)
            for name in operations(comparison.metrics, time)
            if (metric := comparison.metrics[of_operation(time, name)]).reference or metric.candidate
        ]
        for name, metric in sorted(rows, key=lambda row: -abs(row[1].difference or 0.0)):
            yield name, metric, _launches(comparison.metrics.get(of_operation(count, name)))


def _launches(metric: MetricComparison | None) -> str:
    if metric is None or not metric.difference:
        return ""
    return f"{count_text(metric.reference)} to {count_text(metric.candidate)} launches"


def count_text(count: float | None) -> str:
    """A median over ranks and steps need not be whole."""
    return f"{count:,.0f}" if count is not None and count == int(count) else number(count)


@lru_cache(4096)  # ranks have the same
def kernel_name(name: str, max_letters: int = MOST_LETTERS) -> str:
    """A kernel's own name without namespaces, parameters and template arguments, but with the functor or the
    like that tells kernels of one template apart: 'vectorized_elementwise_kernel (FillFunctor)'. Of such a
    text itself."""
    if _SHORT.fullmatch(name) and len(name) <= max_letters:
        return name
    plain = re.sub(r"\(anonymous namespace\)::", "", name.strip())
    head = _without_arguments(plain)
    last_part = re.split(r"::", head.split()[-1])[-1] if head.split() else plain
    functors = re.findall(_TOLD, plain[len(last_part) :]) if "<" in plain else []
    functors = [word for word in functors if word not in last_part]
    if IN_FP64.search(plain) and "double" not in last_part:
        functors = [f"{functors[0]}_double" if functors else "double"]
    text = f"{last_part} ({functors[0]})" if functors else last_part
    return text if len(text) <= max_letters else f"{text[: max_letters - 1]}\u2026"


def _without_arguments(name: str) -> str:
    """The part outside of < > and before a parameter list."""
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
