"""steps.parquet: every step of every run as one row, for questions that the report does not answer.

Columns are named as in the records and in summary.json: comm_ms, comm_ms.all_gather, calibrated.comm_ms,
streams.allgather.busy_ms, device.power_w. A number that was not measured is null; not_measured holds the
reasons of its row as JSON.
"""

import types
import typing
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from aorta.errors import ReportError
from aorta.files import replacing
from aorta.records.schema import (
    STREAM_NAMES,
    Calibrated,
    DeviceRecord,
    MemoryRecord,
    OverlapRecord,
    StepRecord,
    StreamOverlap,
    StreamUse,
)
from aorta.report.metrics import of_operation, operations
from aorta.report.model import Report, Run
from aorta.timeline.collective import STREAM_OF_OP

ROWS_PER_GROUP = 8192
KEYS = ("label", "run", "path", "rank", "global_step", "source")
"""What a row is about: run counts the runs of a label from 0."""
OP_METRICS = ("duration_ms", "wait_ms", "transfer_ms", "busbw_gb_s", "count", "bytes")
"""Per collective operation, from the arrays of the report: they need all ranks, so that a step which not
every rank recorded has none."""
ARROW_TYPES: dict[Any, pa.DataType] = {
    int: pa.int64(),
    float: pa.float64(),
    bool: pa.bool_(),
    str: pa.dictionary(pa.int32(), pa.string()),
}

Row = dict[str, Any]


def write_parquet(path: Path | str, report: Report) -> int:
    """Write steps.parquet, one row group in memory at a time; the number of rows."""
    ops = _ops(report)
    schema = _schema(ops)
    num_rows = 0
    try:
        with replacing(path) as file, pq.ParquetWriter(file, schema, compression="zstd") as writer:
            rows: list[Row] = []
            for row in _rows(report, ops):
                rows.append(row)
                if len(rows) == ROWS_PER_GROUP:
                    writer.write_table(pa.Table.from_pylist(rows, schema))
                    num_rows += len(rows)
                    rows = []
            writer.write_table(pa.Table.from_pylist(rows, schema))
            num_rows += len(rows)
    except OSError as error:
        raise ReportError(f"cannot write {path}: {error.strerror or error}") from error
    return num_rows


def _rows(report: Report, ops: list[str]) -> Iterator[Row]:
    for label, dataset in report.datasets.items():
        for index, judged in enumerate(dataset.runs):
            yield from _run_rows(judged.run, label, index, ops, judged.num_warmup)
            for other_run in judged.run.other_sources.values():
                yield from _run_rows(other_run, label, index, ops, None)


def _run_rows(run: Run, label: str, index: int, ops: list[str], num_warmup: int | None) -> Iterator[Row]:
    column = {step: i for i, step in enumerate(run.global_step.tolist())}
    by_op = [(name, run.metrics[name]) for metric in OP_METRICS for op in ops
             if (name := of_operation(metric, op)) in run.metrics]  # fmt: skip
    for row_of_rank, rank in enumerate(run.ranks):
        for record in run.records(rank):
            row = _flat(record, ops)
            row |= {"label": label, "run": index, "path": str(run.path)}
            i = column.get(record.global_step)
            if i is not None:
                row["warmup"] = None if num_warmup is None else i < num_warmup
                row |= {name: _number(values[row_of_rank, i]) for name, values in by_op}
            yield row


def _flat(record: StepRecord, ops: list[str]) -> Row:
    overlap = record.overlap
    row = {name: getattr(record, name) for name, _ in _fields(StepRecord)}
    row |= {name: getattr(overlap, name) for name, _ in _fields(OverlapRecord)}
    for prefix, part in (
        ("compute_stream", overlap.compute_stream),
        ("calibrated", overlap.calibrated),
        ("memory", record.memory),
        ("device", record.device),
        *((f"streams.{name}", record.streams.get(name)) for name in STREAM_NAMES),
    ):
        if part is not None:
            row |= {f"{prefix}.{name}": getattr(part, name) for name, _ in _fields(type(part))}
    if record.device is not None and record.device.throttling is not None:
        row["device.throttling"] = ", ".join(record.device.throttling)
    for op in ops:
        hidden_ms, exposed_ms = overlap.hidden_by_op.get(op), overlap.exposed_by_op.get(op)
        if hidden_ms is not None and exposed_ms is not None:
            row |= {
                of_operation("comm_ms", op): hidden_ms + exposed_ms,
                of_operation("hidden_ms", op): hidden_ms,
                of_operation("exposed_ms", op): exposed_ms,
            }
    if record.not_measured:
        row["not_measured"] = msgspec.json.encode(record.not_measured, order="sorted").decode()
    return row


def _ops(report: Report) -> list[str]:
    """The operations that have a stream of their own, then whatever else some run used."""
    runs = [judged.run for dataset in report.datasets.values() for judged in dataset.runs]
    runs += [other_run for run in runs for other_run in run.other_sources.values()]
    names = {op for run in runs for op in operations(run.metrics, "comm_ms")}
    return [*STREAM_OF_OP, *sorted(names - set(STREAM_OF_OP))]


def _schema(ops: list[str]) -> pa.Schema:
    text = ARROW_TYPES[str]
    columns: dict[str, pa.DataType] = {name: text for name in KEYS}
    columns |= {"run": pa.int32(), "warmup": pa.bool_()}
    columns |= dict(_fields(StepRecord)) | dict(_fields(OverlapRecord))
    parts: tuple[tuple[str, type], ...] = (
        ("compute_stream", StreamOverlap),
        ("calibrated", Calibrated),
        *((f"streams.{name}", StreamUse) for name in STREAM_NAMES),
        ("memory", MemoryRecord),
        ("device", DeviceRecord),
    )
    for prefix, struct in parts:
        columns |= {f"{prefix}.{name}": kind for name, kind in _fields(struct)}
    columns["device.throttling"] = text
    for metric in ("comm_ms", "hidden_ms", "exposed_ms", *OP_METRICS):
        columns |= {of_operation(metric, op): pa.float64() for op in ops}
    columns["not_measured"] = text
    return pa.schema(list(columns.items()))


@cache
def _fields(struct: type) -> tuple[tuple[str, pa.DataType], ...]:
    """The fields of a record that are one number, flag or text."""
    return tuple(_scalar_fields(struct))


def _scalar_fields(struct: type) -> Iterator[tuple[str, pa.DataType]]:
    for name, hint in typing.get_type_hints(struct).items():
        kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
        plain = [kind for kind in kinds if kind is not type(None)]
        kind = str if typing.get_origin(plain[0]) is typing.Literal else plain[0]
        if len(plain) == 1 and kind in ARROW_TYPES and name not in ("schema", "rocm_smi_output"):
            yield name, ARROW_TYPES[kind]


def _number(value: np.float64) -> float | None:
    return None if np.isnan(value) else float(value)
