"""Records that no run writes, and numbers that contradict each other: refused with their step."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from aorta.account.load.rank.calls import ROUNDING_MS, impossible_record
from aorta.account.load.rank.columns import IMPOSSIBLE, OF_RUN, RankSteps
from aorta.account.load.rank.kernels import GRAPH_NODES, NAME_COUNT
from aorta.account.metrics import MEASURED, OVERLAP_METRICS, metric_key, of_operation, operations
from aorta.errors import RecordError
from aorta.records.table import LineTable, do_integers_fit
from aorta.timeline.arrays import Flags, Floats
from aorta.timeline.types import Source

MOST_MS = 2.0**53


def faults(path: Path, block: LineTable) -> Iterator[tuple[int, RecordError]]:
    """Rows with sizes that do not fit, or an error of a clock that is none."""
    clock_error_us = block.numbers("clock_error_us")
    is_clock_wrong = clock_error_us is not None and bool(
        ((clock_error_us < 0) | (clock_error_us >= MOST_MS)).any()
    )
    if not is_clock_wrong and do_integers_fit(block):
        return
    for row, is_row in enumerate(np.eye(len(block), dtype=bool)):
        line = block.chosen(is_row)
        key = (line.source, line.first.global_step)
        error_us = line.numbers("clock_error_us")
        if not do_integers_fit(line):
            yield row, impossible_record(path, key)
        elif error_us is not None and not 0 <= error_us[0] < MOST_MS:
            yield row, impossible_record(path, key, f"clock_error_us of {error_us[0]:g}")


def without_contradictions(
    path: Path, source: Source, done: RankSteps, left_out: list[str] | None
) -> RankSteps:
    """RecordError for a step whose numbers contradict each other; with a list left_out, the other steps."""
    steps = done.global_step
    is_possible = np.ones(len(steps), dtype=bool)
    for wrong, describe in contradictions(done.numbers):
        if not (wrong & is_possible).any():
            continue
        row = int(np.argmax(wrong & is_possible))
        error = impossible_record(path, (source, int(steps[row])), describe(row))
        if left_out is None:
            raise error
        left_out.append(f"left out with {int((wrong & is_possible).sum()) - 1} more: {error}")
        is_possible &= ~wrong
    return done if is_possible.all() else done.chosen(is_possible, IMPOSSIBLE)


# -- columns that contradict each other -----------------------------------------------------------------

ROUNDING = 1e-6
"""The part of a time by which sums of its parts may be off, beside ROUNDING_MS."""
NO_TIMES = frozenset(("count", "bytes", "busbw_gb_s", "kernel_count", NAME_COUNT, GRAPH_NODES, *OF_RUN))
Contradiction = tuple[Flags, Callable[[int], str]]
"""Which rows, and what is wrong with one."""


def contradictions(metrics: dict[str, Floats]) -> Iterator[Contradiction]:
    """Numbers that no run writes are refused: they would make every statistic of the run nonsense."""

    def contradiction(name: str, wrong: Flags, problem: str) -> Contradiction:
        return wrong, lambda row: f"{name} of {metrics[name][row]:g} {problem}"

    times = [name for name in metrics if metric_key(name).name not in NO_TIMES]
    are_large = np.abs(np.stack([metrics[name] for name in times])) >= MOST_MS
    for name, is_large in zip(times, are_large, strict=True) if are_large.any() else ():
        yield contradiction(name, is_large, "is too large for a time")
    for name in OVERLAP_METRICS:
        yield contradiction(name, metrics[name] < -ROUNDING_MS, "must not be negative")
    yield contradiction(
        "overlap_ratio", metrics["overlap_ratio"] > 1 + ROUNDING_MS, "is more than all of comm_ms"
    )
    for name in (name for name in MEASURED if name in metrics):
        yield contradiction(name, metrics[name] < 0, "must not be negative")
    is_more = _is_more(metrics["hidden_ms"], metrics["comm_ms"])
    yield contradiction("hidden_ms", is_more, "is more than comm_ms")
    yield from _broken_sums(metrics)
    for total in ("comm_ms", "exposed_ms"):
        for name in [of_operation(total, op) for op in operations(metrics, total)]:
            yield contradiction(name, _is_more(metrics[name], metrics[total]), f"is more than all of {total}")


def _broken_sums(metrics: dict[str, Floats]) -> Iterator[Contradiction]:
    """comm = hidden + exposed, step = compute + exposed + idle, where all of it is known."""

    def broken_sum(parts: Sequence[str], total: str) -> Contradiction:
        sums, names = np.sum([metrics[part] for part in parts], axis=0), " + ".join(parts)
        wrong = _is_more(sums, metrics[total]) | _is_more(metrics[total], sums)
        return wrong, lambda row: f"{names} of {sums[row]:.9g} is not {total} of {metrics[total][row]:.9g}"

    yield broken_sum(("hidden_ms", "exposed_ms"), "comm_ms")
    yield broken_sum(("compute_ms", "exposed_ms", "idle_ms"), "step_ms")
    is_more = _is_more(metrics["compute_ms"], metrics["step_ms"])
    yield is_more, lambda row: f"compute_ms of {metrics['compute_ms'][row]:g} is more than step_ms"


def _is_more(larger: Floats, smaller: Floats) -> Flags:
    """Returns True where larger exceeds smaller by more than rounding; False where one is NaN."""
    return larger - smaller > ROUNDING_MS + ROUNDING * np.maximum(larger, smaller)
