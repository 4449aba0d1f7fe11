"""Collects the numbers of one rank by one source, block by block."""

import math
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aorta.errors import RecordError
from aorta.records.blocks import Numbers, StepBlock, fields_of, floats
from aorta.records.schema import OverlapRecord, Source
from aorta.report.load.measures import of_records
from aorta.report.load.rank.calls import (
    ROUNDING_MS,
    CallsBuilder,
    ImpossibleRecord,
    totals_by_kind,
    totals_by_op,
)
from aorta.report.load.rank.columns import Floats, Passes, RankColumns, few_sizes
from aorta.report.load.rank.contradictions import MOST_MS, are_sizes_possible, impossible_record
from aorta.report.load.rank.host import of_host, without_spans
from aorta.report.load.rank.kernels import NamedKernels, of_kernels
from aorta.report.metrics import (
    CALIBRATED_METRICS,
    COMPUTE_STREAM_METRICS,
    METRICS,
    OVERLAP_METRICS,
    STEP_METRICS,
    MetricSource,
    of_operation,
    of_source,
)

TOLERANCE_NS = 100_000
"""By which windows of neighbouring steps may overlap before it is said."""


class SparseColumn:
    """A metric in the rows that have it."""

    def __init__(self) -> None:
        self._rows, self._values = array("q"), array("d")
        self._pieces: list[tuple[int, Floats]] = []

    def set(self, row: int, value: float) -> None:
        self._rows.append(row)
        self._values.append(value)

    def extend(self, first_row: int, values: Floats) -> None:
        """values: of neighbouring rows, NaN where one has none."""
        self._pieces.append((first_row, values))

    def dense(self, num_rows: int) -> Floats:
        """NaN where it was not set; what was set last where it was twice."""
        column = np.full(num_rows, np.nan)
        for first_row, values in self._pieces:
            place = column[first_row : first_row + len(values)]
            np.copyto(place, values, where=~np.isnan(values))
        column[np.array(self._rows, dtype=np.int64)] = np.array(self._values, dtype=np.float64)
        return column


class ColumnsBuilder:
    """Rows as they come; columns that appear late have no value in earlier rows."""

    def __init__(self, path: Path, source: Source) -> None:
        self._path, self._source = path, source
        self._row_of_step: dict[int, int] = {}
        self._passes: list[tuple[int, int, int]] = []
        """Attempt, rollbacks and number of ranks of every row."""
        self._parts: list[tuple[NDArray[Any], ...]] = []
        """As _always gives them, of every block."""
        self._metrics: dict[str, SparseColumn] = {}
        self._calls = CallsBuilder()
        self._kernels = NamedKernels()
        self._not_measured: dict[str, str] = {}
        self._reasons: dict[str, str] = {}
        """The last ones, which most lines repeat."""
        self._repeated: dict[int, list[tuple[int, int]]] = {}
        self._gaps: list[tuple[int, str]] = []

    def add(self, block: StepBlock) -> None:
        """Appends rows. RecordError where a record is none that a run writes, or is there twice."""
        first_row = len(self._passes)
        self._check(block)
        overlaps = [record.overlap for record in block.records]
        self._extend_all(first_row, ((name, block.values[name]) for name in STEP_METRICS))
        self._extend_all(first_row, fields_of(overlaps, OVERLAP_METRICS).items())
        self._add_operations(first_row, overlaps)
        self._add_other_overlaps(first_row, overlaps)
        self._extend_all(first_row, of_records(block.records))
        self._add_calls(first_row, block.records)
        self._add_kernels(first_row, block.records)
        self._add_host(first_row, block.records)
        self._add_reasons(block.records)
        self._parts.append(_always(block, overlaps))

    def _check(self, block: StepBlock) -> None:
        """Places the rows, of new steps and of those done again by a later attempt or after a rollback."""
        clock_error = block.floats("clock_error_us")
        is_clock_plain = clock_error is None or bool(((clock_error >= 0) & (clock_error < MOST_MS)).all())
        steps = block.values["global_step"]
        passes = list(
            zip(*(block.values[name] for name in ("attempt", "rollbacks", "world_size")), strict=True)
        )
        is_new = len(set(steps)) == len(steps) and self._row_of_step.keys().isdisjoint(steps)
        if is_new and is_clock_plain and are_sizes_possible(block):
            self._row_of_step.update((step, row) for row, step in enumerate(steps, start=len(self._passes)))
            self._passes += passes
        else:
            for record, of_record in zip(block.records, passes, strict=True):
                self._check_one(record, of_record)
        self._gaps += [
            (step, gap) for step, gap in zip(steps, block.values["gap"], strict=True) if gap is not None
        ]

    def _check_one(self, record: Numbers, of_record: tuple[int, int, int]) -> None:
        key = (record.source, record.global_step)
        if not are_sizes_possible(StepBlock([record])):
            raise impossible_record(self._path, key)
        if not 0 <= (record.clock_error_us or 0.0) < MOST_MS:
            raise impossible_record(self._path, key, f"clock_error_us of {record.clock_error_us:g}")
        earlier_row = self._row_of_step.get(record.global_step)
        if earlier_row is not None:
            earlier = self._passes[earlier_row][:2]
            if of_record[:2] <= earlier:
                raise RecordError(
                    f"{self._path} mixes runs: global step {record.global_step} by {record.source}"
                    " is there twice"
                )
            self._repeated.setdefault(record.global_step, []).append(earlier)
        self._row_of_step[record.global_step] = len(self._passes)
        self._passes.append(of_record)

    def _column(self, name: str) -> SparseColumn:
        column = self._metrics.get(name)
        if column is None:
            column = self._metrics[name] = SparseColumn()
        return column

    def _extend_all(self, first_row: int, columns: Iterable[tuple[str, Sequence[float | None]]]) -> None:
        for name, values in columns:
            numbers = floats(values)
            if numbers is not None:
                self._column(name).extend(first_row, numbers)

    def _add_operations(self, first_row: int, overlaps: Sequence[OverlapRecord]) -> None:
        hidden = [overlap.hidden_by_op for overlap in overlaps]
        exposed = [overlap.exposed_by_op for overlap in overlaps]
        for op in dict.fromkeys(op for of_record in exposed for op in of_record):
            exposed_ms = floats([of_record.get(op) for of_record in exposed])
            hidden_ms = floats([of_record.get(op) for of_record in hidden])
            if exposed_ms is not None:
                self._column(of_operation("exposed_ms", op)).extend(first_row, exposed_ms)
                if hidden_ms is not None and not np.isnan(hidden_ms + exposed_ms).all():
                    self._column(of_operation("comm_ms", op)).extend(first_row, hidden_ms + exposed_ms)

    def _add_other_overlaps(self, first_row: int, overlaps: Sequence[OverlapRecord]) -> None:
        for row, overlap in enumerate(overlaps, start=first_row):
            if overlap.calibrated is not None:
                numbers = {name: getattr(overlap.calibrated, name) for name in CALIBRATED_METRICS}
                self._set_of("calibrated", row, _without_rounding(numbers), numbers["comm_ms"])
            if overlap.compute_stream is not None:
                numbers = {name: getattr(overlap.compute_stream, name) for name in COMPUTE_STREAM_METRICS}
                self._set_of("compute_stream", row, numbers, overlap.comm_ms)

    def _set_of(
        self, source: MetricSource, row: int, numbers: dict[str, float], comm_ms: float | None
    ) -> None:
        """Numbers beside those of METRICS, with the ratios that are made of them."""
        for name, value in numbers.items():
            self._column(of_source(source, name)).set(row, value)
        for name, total_ms in (("overlap_ratio", comm_ms), ("hidden_per_compute", numbers["compute_ms"])):
            if total_ms is not None and total_ms > 0:
                self._column(of_source(source, name)).set(row, numbers["hidden_ms"] / total_ms)

    def _add_calls(self, first_row: int, records: Sequence[Numbers]) -> None:
        for row, record in enumerate(records, start=first_row):
            if record.collectives or record.active_segments or record.exposed_run_lengths_ns:
                try:
                    self._calls.add(row, record)
                except (ImpossibleRecord, OverflowError, ValueError) as error:
                    problem = (str(error),) if isinstance(error, ImpossibleRecord) else ()
                    key = (record.source, record.global_step)
                    raise impossible_record(self._path, key, *problem) from error

    def _add_kernels(self, first_row: int, records: Sequence[Numbers]) -> None:
        for row, record in enumerate(records, start=first_row):
            if record.kernels is not None:
                for name, value in of_kernels(record.kernels):
                    self._column(name).set(row, value)
                self._kernels.add(row, record.kernels)

    def _add_host(self, first_row: int, records: Sequence[Numbers]) -> None:
        """Most steps have spans; those that have none, and no segments, are alike."""
        empty: list[int] = []
        for row, record in enumerate(records):
            if record.host_spans is None or record.step_ms is None:
                continue
            if not record.host_spans and record.active_segments is None:
                empty.append(row)
                continue
            for name, value in of_host(record):
                self._column(name).set(first_row + row, value)
        if empty:
            values = np.full(len(records), np.nan)
            values[empty] = 0.0
            for name in without_spans():
                self._column(name).extend(first_row, values)

    def _add_reasons(self, records: Sequence[Numbers]) -> None:
        for record in records:
            if record.not_measured != self._reasons:
                self._reasons = record.not_measured
                for name, reason in record.not_measured.items():
                    self._not_measured.setdefault(name.rpartition(".")[2], reason)

    def finished(self, kernel_names: Sequence[str]) -> RankColumns:
        """The columns in order of steps. Raises OverflowError."""
        steps = np.array(list(self._row_of_step), dtype=np.int64)
        by_step = np.argsort(steps, kind="stable")
        # Rows of steps that were done again later are left out here.
        order = np.array(list(self._row_of_step.values()), dtype=np.int64)[by_step]
        attempt, rollbacks, world_size = np.array(self._passes, dtype=np.int64)[order].T
        start, end, tolerance, num, host_bound, details, collectives_kept, exposed_kept = (
            np.concatenate(parts)[order] for parts in zip(*self._parts, strict=True)
        )
        num_rows, num_lines = len(steps), len(self._passes)
        place = np.full(num_lines, -1, dtype=np.int32)
        place[order] = np.arange(num_rows, dtype=np.int32)
        calls = self._calls.finished().moved(place)
        metrics: dict[str, Floats] = {name: np.full(num_rows, np.nan) for name in METRICS}
        metrics |= {name: column.dense(num_lines)[order] for name, column in self._metrics.items()}
        named = self._kernels.columns(kernel_names, num_lines)
        metrics |= {name: values[order] for name, values in named.items()}
        for op, totals in totals_by_op(calls, num_rows).items():
            metrics |= {of_operation(name, op): values for name, values in totals.items()}
        return RankColumns(
            global_step=steps[by_step],
            start_ns=start,
            end_ns=end,
            tolerance_ns=tolerance,
            metrics=metrics,
            num_collectives=num,
            host_bound=host_bound,
            has_details=details,
            has_collectives=collectives_kept,
            has_exposed=exposed_kept,
            collectives=totals_by_kind(calls, calls.duration_ms, few_sizes(calls.kinds), num_rows),
            calls=calls,
            not_measured=self._not_measured,
            passes=Passes(attempt, rollbacks, world_size, self._repeated, self._gaps),
        )


def by_source(block: StepBlock) -> Iterable[tuple[Source, StepBlock]]:
    """The block's records by source."""
    sources = dict.fromkeys(block.values["source"])
    if len(sources) == 1:
        return ((source, block) for source in sources)
    return (
        (source, StepBlock([record for record in block.records if record.source == source]))
        for source in sources
    )


def _always(block: StepBlock, overlaps: Sequence[OverlapRecord]) -> tuple[NDArray[Any], ...]:
    """start_ns, end_ns, tolerance_ns, num_collectives, host_bound, has_details, has_collectives and
    has_exposed of RankColumns."""
    records = block.records
    start_ns = block.integers("start_unix_ns")
    step_ms, clock_error_us = block.floats("step_ms"), block.floats("clock_error_us")
    zeros = np.zeros(len(records))
    host_bound = floats([overlap.host_bound for overlap in overlaps])
    has_segments = np.array([record.active_segments is not None for record in records])
    has_collectives = np.array([record.collectives is not None for record in records])
    has_stretches = np.array([record.exposed_run_lengths_ns is not None for record in records])
    return (
        start_ns,
        start_ns + (zeros if step_ms is None else np.nan_to_num(step_ms, nan=0.0)) * 1e6,
        2000 * (zeros if clock_error_us is None else np.nan_to_num(clock_error_us, nan=0.0)) + TOLERANCE_NS,
        block.integers("num_collectives"),
        np.full(len(records), math.nan) if host_bound is None else host_bound,
        has_collectives & has_segments,
        has_collectives,
        has_segments | has_stretches,
    )


def _without_rounding(numbers: dict[str, float]) -> dict[str, float]:
    """Sums of many pieces: what is below 0, or hidden above comm, by rounding alone is neither."""
    rounded = {name: 0.0 if -ROUNDING_MS < value < 0 else value for name, value in numbers.items()}
    if rounded["comm_ms"] < rounded["hidden_ms"] < rounded["comm_ms"] + ROUNDING_MS:
        rounded["hidden_ms"] = rounded["comm_ms"]
    return rounded
