"""Reduces the record file of one rank to its columns, block by block."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from aorta.account.load.rank.builder import ColumnsBuilder
from aorta.account.load.rank.calls import ROUNDING_MS
from aorta.account.load.rank.columns import IMPOSSIBLE, Floats, RankFile, RunRow
from aorta.account.load.rank.impossible import MOST_MS, check_block, impossible_record
from aorta.account.load.rank.kernels import GRAPH_NODES, NAME_COUNT, NamedKernels
from aorta.account.metrics import (
    MEASURED,
    OVERLAP_METRICS,
    metric_key,
    of_operation,
    operations,
)
from aorta.errors import RecordError, ReportError
from aorta.processes import no_garbage_collection
from aorta.records.blocks import read_blocks
from aorta.records.reader import kernel_names_beside, read_steps
from aorta.records.schema import Source, StepRecord
from aorta.records.table import LineKey, LineTable, StepTable
from aorta.steps.unwritten import unwritten_after

BLOCK_RECORDS = 512


@no_garbage_collection()  # nothing of a record refers to itself
def reduce_file(path: Path, strict: bool = True) -> RankFile:
    """The numbers of one rank_<n>_metrics.jsonl. strict: raise RecordError for what is damaged, instead of
    leaving it out with a note."""
    notes: list[str] = []
    left_out: list[str] | None = None if strict else []
    reduced = _reduce(path, blocks_with_unwritten(path, notes, left_out=left_out), left_out, notes)
    reduced.notes = [*notes, *(left_out or ())]
    reduced.left_out = left_out
    return reduced


def reduce_records(path: Path, records: Iterable[StepRecord]) -> RankFile:
    """The numbers of the records of one rank. path: of its file, or of what else they were read from."""
    left = iter(records)
    return _reduce(path, (LineTable(block) for block in iter(lambda: list(islice(left, BLOCK_RECORDS)), [])))


@dataclass(frozen=True, slots=True)
class LostRank:
    """A rank's file of which nothing can be used."""

    path: Path
    reason: str


def salvage(path: Path) -> RankFile | LostRank:
    """What is left of a rank's file."""
    try:
        return reduce_file(path, False)
    except (RecordError, ReportError) as error:
        return LostRank(path, str(error))


def with_unwritten(
    path: Path, notes: list[str], *, left_out: list[str] | None = None
) -> Iterator[StepRecord]:
    """The records of a file, and the steps that a killed process had closed and not written."""
    last: StepRecord | None = None
    for record in read_steps(path, notes, left_out=left_out):
        last = record
        yield record
    yield from unwritten_after(path, last)


def blocks_with_unwritten(
    path: Path, notes: list[str], *, whole: bool = False, left_out: list[str] | None = None
) -> Iterator[StepTable]:
    """The numbers of with_unwritten, many records at a time. whole: as in read_blocks."""
    last: LineKey | None = None
    for block in read_blocks(path, notes, whole=whole, left_out=left_out):
        last = block.last
        yield block
    if records := unwritten_after(path, last):
        yield LineTable(records)


def _reduce(
    path: Path,
    blocks: Iterable[StepTable],
    left_out: list[str] | None = None,
    notes: list[str] | None = None,
) -> RankFile:
    """left_out: take what is impossible out and tell it there, instead of RecordError. notes: on the names
    of kernels."""
    builders: dict[Source, ColumnsBuilder] = {}
    first: LineKey | None = None
    sizes: dict[int, int] = {}
    for block in blocks:
        first = first or block.first
        for attempt, rank, size in block.distinct("attempt", "rank", "world_size"):
            size_before = sizes.setdefault(attempt, size)
            if (rank, size) != (first.rank, size_before):
                raise RecordError(
                    f"{path} mixes runs: rank {first.rank} of {size_before} and rank {rank} of {size}"
                )
        for source in block.sources():
            part = block.of_source(source)
            if isinstance(part, LineTable):  # columns hold nothing that does not fit
                if left_out is None:
                    check_block(path, part)
                else:
                    part = _possible(path, part, left_out)
            if not len(part):
                continue
            if source not in builders:
                builders[source] = ColumnsBuilder(path, source, NamedKernels())
            builders[source].add(part)
    if first is None:
        raise ReportError(f"{path} holds no step")
    kernel_names = kernel_names_beside(path, first.run_id, notes)
    try:
        columns = {source: builder.finished(kernel_names) for source, builder in builders.items()}
    except OverflowError as error:
        raise impossible_record(path, None) from error
    for source, rank_columns in columns.items():
        columns[source] = _without_contradictions(path, source, rank_columns, left_out)
    steps = {source: rank_columns.steps for source, rank_columns in columns.items()}
    return RankFile(path, first.rank, sizes[max(sizes)], steps, columns, first.run_id)


def _possible(path: Path, block: LineTable, left_out: list[str]) -> LineTable:
    """The block without records that no run writes."""
    try:
        check_block(path, block)
        return block
    except RecordError:
        kept = []
    for record in block.records:
        try:
            check_block(path, LineTable([record]))
            kept.append(record)
        except RecordError as error:
            left_out.append(f"left out: {error}")
    return LineTable(kept)


def _without_contradictions(
    path: Path, source: Source, columns: RunRow, left_out: list[str] | None
) -> RunRow:
    """RecordError for a step whose numbers contradict each other; with a list left_out, the other steps."""
    steps = columns.steps.global_step
    is_possible = np.ones(len(steps), dtype=bool)
    for wrong, describe in contradictions(columns.metrics):
        if not (wrong & is_possible).any():
            continue
        row = int(np.argmax(wrong & is_possible))
        error = impossible_record(path, (source, int(steps[row])), describe(row))
        if left_out is None:
            raise error
        left_out.append(f"left out with {int((wrong & is_possible).sum()) - 1} more: {error}")
        is_possible &= ~wrong
    return columns if is_possible.all() else columns.chosen(is_possible, IMPOSSIBLE)


# -- columns that contradict each other -----------------------------------------------------------------

ROUNDING = 1e-6
"""The part of a time by which sums of its parts may be off, beside ROUNDING_MS."""
NO_TIMES = frozenset(("count", "bytes", "busbw_gb_s", "kernel_count", NAME_COUNT, GRAPH_NODES))
Contradiction = tuple[NDArray[np.bool_], Callable[[int], str]]
"""Which rows, and what is wrong with one."""


def contradictions(metrics: dict[str, Floats]) -> Iterator[Contradiction]:
    """Numbers that no run writes are refused: they would make every statistic of the run nonsense."""

    def contradiction(name: str, wrong: NDArray[np.bool_], problem: str) -> Contradiction:
        return wrong, lambda row: f"{name} of {metrics[name][row]:g} {problem}"

    for name, values in metrics.items():
        if metric_key(name).name not in NO_TIMES:
            yield contradiction(name, np.abs(values) >= MOST_MS, "is too large for a time")
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


def _is_more(larger: Floats, smaller: Floats) -> NDArray[np.bool_]:
    """Returns True where larger exceeds smaller by more than rounding; False where one is NaN."""
    is_more: NDArray[np.bool_] = larger - smaller > ROUNDING_MS + ROUNDING * np.maximum(larger, smaller)
    return is_more
