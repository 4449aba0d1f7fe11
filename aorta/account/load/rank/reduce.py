"""Reduces the record file of one rank to the numbers of its steps, block by block."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aorta.account.load.rank.calls import (
    CallsBuilder,
    few_sizes,
    impossible_record,
    totals_by_kind,
    totals_by_op,
)
from aorta.account.load.rank.columns import OF_RUN, RankFile, RankSteps, packed, unpacked
from aorta.account.load.rank.host import carry_waits, host_metrics, reason_name
from aorta.account.load.rank.impossible import faults, without_contradictions
from aorta.account.load.rank.kernels import NamedKernels, kernel_metrics
from aorta.account.load.rank.phases import phase_metrics
from aorta.account.load.rank.telemetry import Telemetry
from aorta.account.metrics import METRICS, OVERLAP_METRICS, STEP_METRICS, of_operation
from aorta.errors import RecordError, ReportError
from aorta.processes import no_garbage_collection
from aorta.records.blocks import read_blocks
from aorta.records.reader import kernel_names_beside, read_steps
from aorta.records.schema import StepRecord
from aorta.records.table import LineKey, LineTable, StepTable
from aorta.steps.unwritten import unwritten_after
from aorta.timeline.arrays import Floats, Ints
from aorta.timeline.types import Source

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


def salvage(path: Path) -> RankFile | str:
    """What is left of a rank's file, or why nothing of it can be used."""
    try:
        return reduce_file(path, False)
    except (RecordError, ReportError) as error:
        return str(error)


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
    builders: dict[Source, StepsBuilder] = {}
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
                is_possible = np.ones(len(part), dtype=bool)
                for row, fault in faults(path, part):
                    if left_out is None:
                        raise fault
                    is_possible[row] = False
                    left_out.append(f"left out: {fault}")
                part = part if is_possible.all() else part.chosen(is_possible)
            if not len(part):
                continue
            if source not in builders:
                builders[source] = StepsBuilder(path, source, NamedKernels())
            builders[source].add(part)
    if first is None:
        raise ReportError(f"{path} holds no step")
    kernel_names = kernel_names_beside(path, first.run_id, notes)
    try:
        done = {source: builder.finished(kernel_names) for source, builder in builders.items()}
    except OverflowError as error:
        raise impossible_record(path, None) from error
    sources = {source: without_contradictions(path, source, of, left_out) for source, of in done.items()}
    return RankFile(path, first.rank, sizes[max(sizes)], sources, first.run_id)


# -- the columns of one source ----------------------------------------------------------------------------

KEYS = ("global_step", "attempt", "rollbacks", "world_size")
TOLERANCE_NS = 100_000
"""By which windows of neighbouring steps may overlap before it is said."""


class StepsBuilder:
    """Rows as they come; columns that appear late have no value in earlier rows."""

    def __init__(self, path: Path, source: Source, kernels: NamedKernels) -> None:
        self._path, self._source = path, source
        self._num_rows = 0
        self._keys: list[Ints] = []
        """[of KEYS, row] of every block."""
        self._parts: list[tuple[NDArray[Any], ...]] = []
        """As _always gives them, of every block."""
        self._metrics: list[tuple[int, dict[str, Floats]]] = []
        """First row and columns of every block."""
        self._calls = CallsBuilder()
        self._kernels = kernels
        self._telemetry = Telemetry()
        self._not_measured: dict[str, str] = {}
        self._reasons: dict[str, str] = {}
        """The last ones, which most lines repeat."""
        self._gaps: list[tuple[int, str]] = []

    def add(self, block: StepTable) -> None:
        """Appends rows. RecordError where a record is none that a run writes."""
        first_row = self._num_rows
        self._num_rows += len(block)
        self._keys.append(np.stack([block.integers(name) for name in KEYS]))
        self._gaps += block.gaps()
        self._parts.append(_always(block))
        self._note_reasons(block)
        metrics = overlap_metrics(block) | self._telemetry.of(block)
        metrics |= host_metrics(block) | phase_metrics(block)
        self._metrics.append((first_row, metrics | kernel_metrics(block)))
        self._kernels.add(first_row, block)
        self._calls.add(self._path, first_row, block)

    def _last_rows(
        self, steps: Ints, attempt: Ints, rollbacks: Ints
    ) -> tuple[Ints, dict[int, list[tuple[int, int]]]]:
        """The row of each step, in order of steps, and attempt and rollbacks of the earlier times that it was
        done: by an earlier attempt or before a rollback. RecordError where it is there twice."""
        order = np.argsort(steps, kind="stable")
        is_repeated = steps[order][1:] == steps[order][:-1]
        repeated: dict[int, list[tuple[int, int]]] = {}
        for earlier, later in zip(order[:-1][is_repeated], order[1:][is_repeated], strict=True):
            step, before = int(steps[earlier]), (int(attempt[earlier]), int(rollbacks[earlier]))
            if (attempt[later], rollbacks[later]) <= before:
                raise RecordError(
                    f"{self._path} mixes runs: global step {step} by {self._source} appears twice"
                )
            repeated.setdefault(step, []).append(before)
        return order[np.append(~is_repeated, True)], repeated

    def _note_reasons(self, block: StepTable) -> None:
        for reasons in block.reasons:
            if reasons != self._reasons:
                self._reasons = reasons
                for name, reason in reasons.items():
                    self._not_measured.setdefault(reason_name(name), reason)

    def finished(self, kernel_names: Sequence[str]) -> RankSteps:
        """The numbers in order of steps. OverflowError, or RecordError where a step is there twice."""
        keys = np.concatenate(self._keys, axis=1)
        # Rows of steps that were done again later are left out here.
        rows, repeated = self._last_rows(*keys[:3])
        steps, attempt, rollbacks, world_size = keys[:, rows]
        num_rows, num_lines = len(rows), self._num_rows
        is_in_order = num_rows == num_lines and bool((np.diff(rows) == 1).all())
        order = slice(None) if is_in_order else rows  # which copies nothing
        start_ns, reach_ns, num, host_bound, details, collectives_kept, exposed_kept = (
            np.concatenate(parts)[order] for parts in zip(*self._parts, strict=True)
        )
        place = np.full(num_lines, -1, dtype=np.int32)
        place[order] = np.arange(num_rows, dtype=np.int32)
        metrics: dict[str, Floats] = dict.fromkeys(METRICS, np.broadcast_to(np.nan, (num_rows,)))
        metrics |= {name: values[order] for name, values in _joined(self._metrics, num_lines).items()}
        carry_waits(metrics, steps)
        named = self._kernels.columns(kernel_names, num_lines)
        metrics |= {name: values[order] for name, values in named.items()}
        calls = self._calls.finished(place)
        duration_ms = calls.duration_ms
        for op, totals in totals_by_op(calls, duration_ms, num_rows).items():
            metrics |= {of_operation(name, op): values for name, values in totals.items()}
        by_kind = totals_by_kind(calls, duration_ms, few_sizes(calls.kinds), num_rows)
        return RankSteps(
            global_step=steps,
            attempt=unpacked(packed(attempt)),
            rollbacks=unpacked(packed(rollbacks)),
            world_size=unpacked(packed(world_size)),
            repeated=repeated,
            gaps=self._gaps,
            has_details=details,
            has_collectives=collectives_kept,
            has_exposed=exposed_kept,
            overlaps_next=np.append(reach_ns[:-1] > start_ns[1:], False),
            collectives={
                key: (count[collectives_kept], sum_ms[collectives_kept])
                for key, (count, sum_ms) in by_kind.items()
            },
            calls=calls,
            not_measured=self._not_measured,
            numbers=metrics | dict(zip(OF_RUN, (start_ns, num, host_bound), strict=True)),
        )


def _always(block: StepTable) -> tuple[NDArray[Any], ...]:
    """start_ns, the start that the next window may have at the earliest, num_collectives and host_bound, and
    has_details, has_collectives and has_exposed of RankSteps."""
    start_ns = block.integers("start_unix_ns")
    step_ms, clock_error_us = block.numbers("step_ms"), block.numbers("clock_error_us")
    host_bound = block.numbers("host_bound")
    zeros = np.zeros(len(block))
    end_ns = start_ns + (zeros if step_ms is None else np.fmax(step_ms, 0.0)) * 1e6
    error_us = zeros if clock_error_us is None else np.fmax(clock_error_us, 0.0)
    tolerance_ns = 2000 * error_us + TOLERANCE_NS
    has_segments, has_collectives = block.has("active_segments"), block.has("collectives")
    return (
        start_ns,
        end_ns - tolerance_ns,
        block.integers("num_collectives"),
        np.full(len(block), np.nan) if host_bound is None else host_bound,
        has_collectives & has_segments,
        has_collectives,
        has_segments | block.has("exposed_run_lengths_ns"),
    )


def _joined(blocks: list[tuple[int, dict[str, Floats]]], num_rows: int) -> dict[str, Floats]:
    """Columns of all rows; NaN where a block has none."""
    if len(blocks) == 1:
        return blocks[0][1]
    columns: dict[str, Floats] = {}
    for first_row, metrics in blocks:
        for name, values in metrics.items():
            if name not in columns:
                columns[name] = np.full(num_rows, np.nan)
            columns[name][first_row : first_row + len(values)] = values
    return columns


# -- times of a step, and how communication overlaps with compute ---------------------------------------


def overlap_metrics(block: StepTable) -> dict[str, Floats]:
    """By metric, a value per line, NaN where it has none; without metrics that no line has."""
    columns = {name: block.numbers(name) for name in (*STEP_METRICS, *OVERLAP_METRICS)}
    metrics = {name: values for name, values in columns.items() if values is not None}
    return metrics | _operations(block)


def _operations(block: StepTable) -> dict[str, Floats]:
    """exposed_ms.<op> and comm_ms.<op>"""
    metrics = {}
    for op in block.operations():
        exposed_ms, hidden_ms = (block.numbers(f"{name}_by_op.{op}") for name in ("exposed", "hidden"))
        if exposed_ms is not None:
            metrics[of_operation("exposed_ms", op)] = exposed_ms
            if hidden_ms is not None and not np.isnan(hidden_ms + exposed_ms).all():
                metrics[of_operation("comm_ms", op)] = hidden_ms + exposed_ms
    return metrics
