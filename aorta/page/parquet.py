"""steps.parquet: every step of every run as one row, for questions that the report does not answer.

Columns are named as in the records and in summary.json: comm_ms, comm_ms.all_gather,
streams.allgather.busy_ms, device.power_w. A number that was not measured is null; not_measured holds the
reasons of its row as JSON.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from aorta.account.metrics import of_operation, operations
from aorta.account.model import Report, Run
from aorta.errors import ReportError
from aorta.files import replacing
from aorta.records.table import (
    FIELDS,
    NOT_MEASURED,
    NULL,
    THROTTLING,
    LineTable,
    StepTable,
)
from aorta.timeline.collective import STREAM_OF_OP

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

ROWS_PER_GROUP = 8192
KEYS = ("label", "run", "path", "rank", "global_step", "source")
"""Columns that say what a row is about; run counts the runs of a label from 0."""
OP_METRICS = ("duration_ms", "wait_ms", "transfer_ms", "busbw_gb_s", "count", "bytes")
"""Per collective operation, from the arrays of the report: they need all ranks, so that a step which not
every rank recorded has none."""
ARROW_TYPES: dict[Any, pa.DataType] = {
    int: pa.int64(),
    float: pa.float64(),
    bool: pa.bool_(),
    str: pa.dictionary(pa.int32(), pa.string()),
}
COLUMNS_OF_LINES = {
    name: kind for name, kind in FIELDS.items() if name not in ("schema", NOT_MEASURED, THROTTLING)
}
"""Columns of a block that are columns of the table, with their type."""


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
    """Tables of ROWS_PER_GROUP rows, and what is left."""
    waiting: list[pa.Table] = []
    num_waiting = 0
    for table in tables:
        while num_waiting + len(table) >= ROWS_PER_GROUP:
            num_taken = ROWS_PER_GROUP - num_waiting
            yield _joined([*waiting, table.slice(0, num_taken)])
            table, waiting, num_waiting = table.slice(num_taken), [], 0
        if len(table):
            waiting.append(table)
            num_waiting += len(table)
    yield _joined(waiting) if waiting else schema.empty_table()


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
    by_op = [name for metric in OP_METRICS for op in ops if (name := of_operation(metric, op)) in run.metrics]
    column_order = np.argsort(run.global_step, kind="stable")
    steps = run.global_step[column_order]
    for row_of_rank, rank in enumerate(run.ranks):
        rank_values = {name: run.metrics[name][row_of_rank] for name in by_op}
        for block in _blocks(run, rank):
            columns = _of_lines(block, ops)
            path = os.fsencode(run.path).decode(errors="replace")
            columns |= {"label": _text(label, len(block)), "path": _text(path, len(block))}
            columns["run"] = pa.array(np.full(len(block), index, dtype=np.int32))
            place, is_judged = _places(steps, column_order, block.integers("global_step"))
            if num_warmup is not None:
                columns["warmup"] = pa.array(place < num_warmup, mask=~is_judged)
            columns |= {
                name: _floats(np.where(is_judged, values[place], np.nan))
                for name, values in rank_values.items()
            }
            yield pa.Table.from_arrays(
                [
                    columns[field.name] if field.name in columns else pa.nulls(len(block), field.type)
                    for field in schema
                ],
                schema=schema,
            )


def _places(steps: Ints, column_order: Ints, global_steps: Ints) -> tuple[Ints, NDArray[np.bool_]]:
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


def _of_lines(block: StepTable, ops: list[str]) -> dict[str, pa.Array]:
    """Columns that come from the lines alone, without the other ranks."""
    columns: dict[str, pa.Array] = {}
    for name, kind in COLUMNS_OF_LINES.items():
        if name not in block:
            continue
        if kind is float and (numbers := block.numbers(name)) is not None:
            columns[name] = _floats(numbers)
        elif kind is int:
            values = block.integers(name)
            columns[name] = pa.array(values, mask=values == NULL)
        elif kind is bool:
            flags = block.flags(name)
            columns[name] = pa.array(flags == 1, mask=flags < 0)
        else:
            text_places, names = block.places(name)
            columns[name] = _texts(text_places, names)
    if THROTTLING in block:
        places, table = block.places(THROTTLING)
        columns[THROTTLING] = _texts(places, [", ".join(msgspec.json.decode(text)) for text in table])
    reasons, texts = block.places(NOT_MEASURED)
    columns[NOT_MEASURED] = _texts(reasons, [None if text == "{}" else _in_order(text) for text in texts])
    for op in ops:
        hidden_ms, exposed_ms = (block.numbers(f"{name}_by_op.{op}") for name in ("hidden", "exposed"))
        if hidden_ms is None or exposed_ms is None:
            continue
        comm_ms = hidden_ms + exposed_ms
        is_known = ~np.isnan(comm_ms)
        columns[of_operation("comm_ms", op)] = _floats(comm_ms)
        columns[of_operation("hidden_ms", op)] = _floats(np.where(is_known, hidden_ms, np.nan))
        columns[of_operation("exposed_ms", op)] = _floats(np.where(is_known, exposed_ms, np.nan))
    return columns


def _in_order(reasons: str) -> str:
    return msgspec.json.encode(msgspec.json.decode(reasons), order="sorted").decode()


def _floats(values: Floats) -> pa.Array:
    """NaN is null."""
    return pa.array(values, type=pa.float64(), from_pandas=True)


def _texts(places: NDArray[np.int32], table: Sequence[str | None]) -> pa.Array:
    """places: in the table, -1 of a text that is not there, as is None."""
    new_places: dict[str, int] = {}
    moved = [-1 if text is None else new_places.setdefault(text, len(new_places)) for text in table]
    indices = np.array([*moved, -1], dtype=np.int32)[places]
    dictionary = pa.array(list(new_places), type=pa.string())
    return pa.DictionaryArray.from_arrays(pa.array(indices, mask=indices < 0), dictionary)


def _text(text: str, num: int) -> pa.Array:
    return _texts(np.zeros(num, dtype=np.int32), [text])


def _ops(report: Report) -> list[str]:
    """The operations that have a stream of their own, then whatever else some run used."""
    runs = [judged for dataset in report.datasets.values() for judged in dataset.runs]
    runs += [other_run for run in runs for other_run in run.other_sources.values()]
    names = {op for run in runs for op in operations(run.metrics, "comm_ms")}
    return [*STREAM_OF_OP, *sorted(names - set(STREAM_OF_OP))]


def _schema(ops: list[str]) -> pa.Schema:
    text = ARROW_TYPES[str]
    columns: dict[str, pa.DataType] = {name: text for name in KEYS}
    columns |= {"run": pa.int32(), "warmup": pa.bool_()}
    columns |= {name: ARROW_TYPES[kind] for name, kind in COLUMNS_OF_LINES.items()}
    columns["device.throttling"] = text
    for metric in ("comm_ms", "hidden_ms", "exposed_ms", *OP_METRICS):
        columns |= {of_operation(metric, op): pa.float64() for op in ops}
    columns["not_measured"] = text
    return pa.schema(list(columns.items()))
