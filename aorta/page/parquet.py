"""steps.parquet: every step of every run as one row, for questions that the report does not answer.

Columns are named as in the records and in summary.json: comm_ms, comm_ms.all_gather,
streams.allgather.busy_ms, device.power_w. A number that was not measured is null; not_measured holds the
reasons of its row as JSON.
"""

import os
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from aorta.account.metrics import of_operation, operations
from aorta.account.model import Report, Run
from aorta.errors import ReportError
from aorta.files import replacing
from aorta.records.columns import arrow_column, arrow_schema
from aorta.records.table import FIELDS, NOT_MEASURED, THROTTLING, LineTable, StepTable, Texts
from aorta.timeline.arrays import Flags, Ints
from aorta.timeline.collective import STREAM_OF_OP

ROWS_PER_GROUP = 8192
KEYS = ("label", "run", "path", "rank", "global_step", "source")
"""Columns that say what a row is about; run counts the runs of a label from 0."""
OP_METRICS = ("duration_ms", "wait_ms", "transfer_ms", "busbw_gb_s", "count", "bytes")
"""Per collective operation, from the arrays of the report: they need all ranks, so that a step which not
every rank recorded has none."""
TEXT = pa.dictionary(pa.int32(), pa.string())


def write_parquet(path: Path | str, report: Report) -> int:
    """Write steps.parquet, one row group in memory at a time; the number of rows."""
    ops = _ops(report)
    schema = _schema(ops)
    num_rows = 0
    try:
        with replacing(path) as file, pq.ParquetWriter(file, schema, compression="zstd") as writer:
            for group in _row_groups(_tables(report, ops, schema), schema):
                writer.write_table(group)
                num_rows += len(group)
    except OSError as error:
        raise ReportError(f"cannot write {path}: {error.strerror or error}") from error
    return num_rows


def _row_groups(tables: Iterable[pa.Table], schema: pa.Schema) -> Iterator[pa.Table]:
    """Tables of ROWS_PER_GROUP rows or little more, and what is left."""
    waiting = [schema.empty_table()]
    for table in tables:
        waiting.append(table)
        if sum(map(len, waiting)) >= ROWS_PER_GROUP:
            yield _joined(waiting)
            waiting = [schema.empty_table()]
    yield _joined(waiting)


def _joined(tables: list[pa.Table]) -> pa.Table:
    return pa.concat_tables(tables).unify_dictionaries().combine_chunks()


def _tables(report: Report, ops: list[str], schema: pa.Schema) -> Iterator[pa.Table]:
    for label, dataset in report.datasets.items():
        for index, judged in enumerate(dataset.runs):
            yield from _tables_of_run(judged, label, index, ops, judged.num_warmup, schema)
            for other_run in judged.other_sources.values():
                yield from _tables_of_run(other_run, label, index, ops, None, schema)


def _tables_of_run(
    run: Run, label: str, index: int, ops: list[str], num_warmup: int | None, schema: pa.Schema
) -> Iterator[pa.Table]:
    texts = {"label": label, "path": os.fsencode(run.path).decode(errors="replace")}
    by_op = [name for metric in OP_METRICS for op in ops if (name := of_operation(metric, op)) in run.metrics]
    column_order = np.argsort(run.global_step, kind="stable")
    steps = run.global_step[column_order]
    for row_of_rank, rank in enumerate(run.ranks):
        rank_values = {name: run.metrics[name][row_of_rank] for name in by_op}
        for block in _blocks(run, rank):
            columns = _of_lines(block, ops, schema)
            columns |= {name: pa.repeat(text, len(block)).dictionary_encode() for name, text in texts.items()}
            columns["run"] = pa.repeat(pa.scalar(index, pa.int32()), len(block))
            place, is_judged = _places(steps, column_order, block.integers("global_step"))
            if num_warmup is not None:
                columns["warmup"] = pa.array(place < num_warmup, mask=~is_judged)
            columns |= {
                name: arrow_column(np.where(is_judged, values[place], np.nan), pa.float64())
                for name, values in rank_values.items()
            }
            yield pa.Table.from_arrays(
                [
                    columns[field.name] if field.name in columns else pa.nulls(len(block), field.type)
                    for field in schema
                ],
                schema=schema,
            )


def _places(steps: Ints, column_order: Ints, global_steps: Ints) -> tuple[Ints, Flags]:
    """Columns of a run by global step, and which steps it has. steps: in order, columns in_order."""
    if not len(steps):
        return np.zeros(len(global_steps), dtype=np.int64), np.zeros(len(global_steps), dtype=bool)
    place = np.minimum(np.searchsorted(steps, global_steps), len(steps) - 1)
    return column_order[place], np.equal(steps[place], global_steps)


def _blocks(run: Run, rank: int) -> Iterator[StepTable]:
    if run.columns is not None:
        yield from run.columns(rank)
        return
    records = run.records(rank)
    while batch := list(islice(records, ROWS_PER_GROUP)):
        yield LineTable(batch)


def _of_lines(block: StepTable, ops: list[str], schema: pa.Schema) -> dict[str, pa.Array]:
    """Columns that come from the lines alone, without the other ranks."""
    found = {name: column for name in FIELDS if (column := block.column(name)) is not None}
    throttling, table = block.throttling()
    found[THROTTLING] = Texts(throttling, [", ".join(reasons) for reasons in table])
    places, texts = block.places(NOT_MEASURED)
    is_said = np.array([text != "{}" for text in texts] + [False], dtype=bool)[places]
    found[NOT_MEASURED] = Texts(np.where(is_said, places, -1), [*map(_in_order, texts)])
    for op in ops:
        hidden_ms, exposed_ms = (block.numbers(f"{name}_by_op.{op}") for name in ("hidden", "exposed"))
        if hidden_ms is not None and exposed_ms is not None:
            comm_ms = hidden_ms + exposed_ms
            found[of_operation("comm_ms", op)] = comm_ms
            found[of_operation("hidden_ms", op)] = np.where(np.isnan(comm_ms), np.nan, hidden_ms)
            found[of_operation("exposed_ms", op)] = np.where(np.isnan(comm_ms), np.nan, exposed_ms)
    columns = {
        field.name: arrow_column(found[field.name], field.type) for field in schema if field.name in found
    }
    return {
        name: column.dictionary_encode() if column.type == pa.string() else column
        for name, column in columns.items()
    }


def _in_order(reasons: str) -> str:
    return msgspec.json.encode(msgspec.json.decode(reasons), order="sorted").decode()


def _ops(report: Report) -> list[str]:
    """The operations that have a stream of their own, then whatever else some run used."""
    runs = [judged for dataset in report.datasets.values() for judged in dataset.runs]
    runs += [other_run for run in runs for other_run in run.other_sources.values()]
    names = {op for run in runs for op in operations(run.metrics, "comm_ms")}
    return [*STREAM_OF_OP, *sorted(names - set(STREAM_OF_OP))]


def _schema(ops: list[str]) -> pa.Schema:
    columns: dict[str, pa.DataType] = {name: TEXT for name in KEYS}
    columns |= {"run": pa.int32(), "warmup": pa.bool_()}
    kinds = {name: arrow_schema().field(name).type for name in FIELDS if name not in ("schema", NOT_MEASURED)}
    columns |= {name: TEXT if kind == pa.string() else kind for name, kind in kinds.items()}
    for metric in ("comm_ms", "hidden_ms", "exposed_ms", *OP_METRICS):
        columns |= {of_operation(metric, op): pa.float64() for op in ops}
    columns[NOT_MEASURED] = TEXT
    return pa.schema(list(columns.items()))
