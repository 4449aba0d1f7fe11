"""Reduces the record file of one rank to its columns, line by line."""

from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from pathlib import Path

import numpy as np

from aorta.errors import RecordError, ReportError
from aorta.records.files import STEPS_FILE, kernels_name, unwritten_name
from aorta.records.reader import read_kernel_names, read_steps
from aorta.records.schema import Source, StepRecord
from aorta.report.load.calls import ROUNDING_MS, CallsBuilder, ImpossibleRecord, totals_by_kind, totals_by_op
from aorta.report.load.columns import Floats, Passes, RankColumns, RankFile, few_sizes
from aorta.report.load.contradictions import MOST_MS, contradictions, impossible_record, sizes_are_possible
from aorta.report.load.host import of_host
from aorta.report.load.kernels import NamedKernels, of_kernels
from aorta.report.load.measures import of_record
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
from aorta.steps.unwritten import unwritten_steps

TOLERANCE_NS = 100_000
"""By which windows of neighbouring steps may overlap before it is said."""


def reduce_file(path: Path) -> RankFile:
    """The numbers of one rank_<n>_metrics.jsonl."""
    notes: list[str] = []
    reduced = reduce_records(path, with_unwritten(path, notes), kernel_names_beside(path))
    reduced.notes = notes
    return reduced


def kernel_names_beside(path: Path) -> list[str]:
    """What the lines of a rank's file refer to."""
    named = STEPS_FILE.fullmatch(path.name)
    return [] if named is None else read_kernel_names(path.with_name(kernels_name(int(named[1]))))


def with_unwritten(path: Path, notes: list[str]) -> Iterator[StepRecord]:
    """The records of a file, and the steps that a killed process had closed and not written."""
    last: StepRecord | None = None
    for record in read_steps(path, notes):
        last = record
        yield record
    named = STEPS_FILE.fullmatch(path.name)
    if named is not None:
        unwritten_path = path.with_name(unwritten_name(int(named[1])))
        if last is None:
            yield from unwritten_steps(unwritten_path, None, None)
        else:
            run_attempt, last_step = (last.run_id, last.attempt), (last.rollbacks, last.global_step)
            yield from unwritten_steps(unwritten_path, run_attempt, last_step)


def reduce_records(path: Path, records: Iterable[StepRecord], kernel_names: Sequence[str] = ()) -> RankFile:
    """The numbers of the records of one rank. kernel_names: what their kernels refer to."""
    building: dict[Source, ColumnsBuilder] = {}
    first: StepRecord | None = None
    sizes: dict[int, int] = {}
    for record in records:
        first = first or record
        size = sizes.setdefault(record.attempt, record.world_size)
        if (record.rank, record.world_size) != (first.rank, size):
            raise RecordError(
                f"{path} mixes runs: rank {first.rank} of {size}"
                f" and rank {record.rank} of {record.world_size}"
            )
        key = (record.source, record.global_step)
        if not sizes_are_possible(record):
            raise impossible_record(path, key)
        if not 0 <= (record.clock_error_us or 0.0) < MOST_MS:
            raise impossible_record(path, key, f"clock_error_us of {record.clock_error_us:g}")
        rows = building.setdefault(record.source, ColumnsBuilder())
        if not rows.may_follow(record):
            raise RecordError(
                f"{path} mixes runs: global step {record.global_step} by {record.source} is there twice"
            )
        try:
            rows.add(record)
        except ImpossibleRecord as error:
            raise impossible_record(path, key, str(error)) from error
        except (OverflowError, ValueError) as error:
            raise impossible_record(path, key) from error
    if first is None:
        raise ReportError(f"{path} holds no step")
    try:
        columns = {source: rows.finished(kernel_names) for source, rows in building.items()}
    except OverflowError as error:
        raise impossible_record(path, None) from error
    for source, rank_columns in columns.items():
        for wrong, describe in contradictions(rank_columns.metrics):
            if wrong.any():
                row = int(np.argmax(wrong))
                raise impossible_record(path, (source, int(rank_columns.global_step[row])), describe(row))
    return RankFile(path, first.rank, sizes[max(sizes)], columns, first.run_id)


_of_step = attrgetter(*STEP_METRICS)
_of_overlap = attrgetter(*OVERLAP_METRICS)


class ColumnsBuilder:
    """Rows as they come; columns that appear late have no value in earlier rows."""

    def __init__(self) -> None:
        self.row_of_step: dict[int, int] = {}
        self.rows: list[tuple[int, float, float, int, float, bool, bool, bool]] = []
        self.always: list[tuple[float | None, ...]] = []
        """METRICS of every row."""
        self.columns: dict[str, dict[int, float]] = {}
        """The other metrics, by row."""
        self.calls = CallsBuilder()
        self.kernels = NamedKernels()
        self.not_measured: dict[str, str] = {}
        self.passes: list[tuple[int, int, int]] = []
        self.repeated: dict[int, list[tuple[int, int]]] = {}
        self.gaps: list[tuple[int, str]] = []

    def may_follow(self, record: StepRecord) -> bool:
        """Returns True for a new step, and for one done again by a later attempt or after a rollback."""
        row = self.row_of_step.get(record.global_step)
        return row is None or (record.attempt, record.rollbacks) > self.passes[row][:2]

    def add(self, record: StepRecord) -> None:
        row = len(self.rows)
        earlier_row = self.row_of_step.get(record.global_step)
        if earlier_row is not None:
            self.repeated.setdefault(record.global_step, []).append(self.passes[earlier_row][:2])
        if record.gap is not None:
            self.gaps.append((record.global_step, record.gap))
        self.row_of_step[record.global_step] = row
        self.passes.append((record.attempt, record.rollbacks, record.world_size))
        overlap = record.overlap
        self.always.append(_of_step(record) + _of_overlap(overlap))
        for op, exposed_ms in overlap.exposed_by_op.items():
            self._set(of_operation("exposed_ms", op), row, exposed_ms)
            if op in overlap.hidden_by_op:
                self._set(of_operation("comm_ms", op), row, overlap.hidden_by_op[op] + exposed_ms)
        if overlap.calibrated is not None:
            numbers = {name: getattr(overlap.calibrated, name) for name in CALIBRATED_METRICS}
            self._set_of("calibrated", row, _without_rounding(numbers), numbers["comm_ms"])
        if overlap.compute_stream is not None:
            numbers = {name: getattr(overlap.compute_stream, name) for name in COMPUTE_STREAM_METRICS}
            self._set_of("compute_stream", row, numbers, overlap.comm_ms)
        for name, value in of_record(record):
            self._set(name, row, value)
        for name, value in of_kernels(record):
            self._set(name, row, value)
        for name, value in of_host(record):
            self._set(name, row, value)
        self.calls.add(row, record)
        self.kernels.add(row, record.kernels)
        for name, reason in record.not_measured.items():
            self.not_measured.setdefault(name.rpartition(".")[2], reason)
        self.rows.append(
            (
                record.start_unix_ns,
                record.start_unix_ns + (record.step_ms or 0.0) * 1e6,
                2000 * (record.clock_error_us or 0.0) + TOLERANCE_NS,
                record.num_collectives,
                np.nan if overlap.host_bound is None else float(overlap.host_bound),
                record.collectives is not None and record.active_segments is not None,
                record.collectives is not None,
                record.active_segments is not None or record.exposed_run_lengths_ns is not None,
            )
        )

    def _set(self, name: str, row: int, value: float | None) -> None:
        if value is not None:
            self.columns.setdefault(name, {})[row] = value

    def _set_of(
        self, source: MetricSource, row: int, numbers: dict[str, float], comm_ms: float | None
    ) -> None:
        """Numbers beside those of METRICS, with the ratios that are made of them."""
        for name, value in numbers.items():
            self._set(of_source(source, name), row, value)
        for name, total_ms in (("overlap_ratio", comm_ms), ("hidden_per_compute", numbers["compute_ms"])):
            if total_ms is not None and total_ms > 0:
                self._set(of_source(source, name), row, numbers["hidden_ms"] / total_ms)

    def finished(self, kernel_names: Sequence[str]) -> RankColumns:
        steps = np.array(list(self.row_of_step), dtype=np.int64)
        by_step = np.argsort(steps, kind="stable")
        # Rows of steps that were done again later are left out here.
        order = np.array(list(self.row_of_step.values()), dtype=np.int64)[by_step]
        attempt, rollbacks, world_size = np.array(self.passes, dtype=np.int64)[order].T
        start, end, tolerance, num, host_bound, details, collectives_kept, exposed_kept = zip(
            *self.rows, strict=True
        )
        num_rows = len(steps)
        place = np.full(len(self.rows), -1, dtype=np.int32)
        place[order] = np.arange(num_rows, dtype=np.int32)
        calls = self.calls.finished().moved(place)
        metrics = dict(zip(METRICS, np.array(self.always, dtype=np.float64)[order].T, strict=True))
        metrics |= {name: _column(values, len(self.rows))[order] for name, values in self.columns.items()}
        named = self.kernels.columns(kernel_names, len(self.rows))
        metrics |= {name: values[order] for name, values in named.items()}
        for op, totals in totals_by_op(calls, num_rows).items():
            metrics |= {of_operation(name, op): values for name, values in totals.items()}
        return RankColumns(
            global_step=steps[by_step],
            start_ns=np.array(start, dtype=np.int64)[order],
            end_ns=np.array(end, dtype=np.float64)[order],
            tolerance_ns=np.array(tolerance, dtype=np.float64)[order],
            metrics=metrics,
            num_collectives=np.array(num, dtype=np.int64)[order],
            host_bound=np.array(host_bound, dtype=np.float64)[order],
            has_details=np.array(details, dtype=bool)[order],
            has_collectives=np.array(collectives_kept, dtype=bool)[order],
            has_exposed=np.array(exposed_kept, dtype=bool)[order],
            collectives=totals_by_kind(calls, calls.duration_ms, few_sizes(calls.kinds), num_rows),
            calls=calls,
            not_measured=self.not_measured,
            passes=Passes(attempt, rollbacks, world_size, self.repeated, self.gaps),
        )


def _without_rounding(numbers: dict[str, float]) -> dict[str, float]:
    """Sums of many pieces: what is below 0, or hidden above comm, by rounding alone is neither."""
    rounded = {name: 0.0 if -ROUNDING_MS < value < 0 else value for name, value in numbers.items()}
    if rounded["comm_ms"] < rounded["hidden_ms"] < rounded["comm_ms"] + ROUNDING_MS:
        rounded["hidden_ms"] = rounded["comm_ms"]
    return rounded


def _column(values: dict[int, float], num_rows: int) -> Floats:
    column = np.full(num_rows, np.nan)
    column[list(values)] = list(values.values())
    return column
