"""Reduces the record file of one rank to its columns, block by block."""

from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np

from aorta.account.load.rank.builder import ColumnsBuilder
from aorta.account.load.rank.columns import RankFile
from aorta.account.load.rank.contradictions import contradictions
from aorta.account.load.rank.impossible import check_block, impossible_record
from aorta.account.load.rank.kernels import NamedKernels
from aorta.errors import RecordError, ReportError
from aorta.processes import no_garbage_collection
from aorta.records.columns.blocks import read_blocks, read_columns
from aorta.records.columns.column_block import ColumnBlock, part_of_records
from aorta.records.columns.flat import NotPlain
from aorta.records.columns.number_block import LineKey, NumberBlock
from aorta.records.columns.step_block import StepBlock
from aorta.records.reader import kernel_names_beside, read_steps
from aorta.records.schema import Source, StepRecord
from aorta.steps.process import unwritten_after

BLOCK_RECORDS = 512
COLUMNS_VERSION = 5
"""Raised with every change of what columns are made of lines, or of how they are stored."""


@no_garbage_collection()  # nothing of a record refers to itself
def reduce_file(path: Path) -> RankFile:
    """The numbers of one rank_<n>_metrics.jsonl."""
    notes: list[str] = []
    reduced = _reduce(path, _blocks_of_file(path, notes))
    reduced.notes = notes
    return reduced


def reduce_records(path: Path, records: Iterable[StepRecord]) -> RankFile:
    """The numbers of the records of one rank. path: of its file, or of what else they were read from."""
    left = iter(records)
    return _reduce(path, (StepBlock(block) for block in iter(lambda: list(islice(left, BLOCK_RECORDS)), [])))


def with_unwritten(path: Path, notes: list[str]) -> Iterator[StepRecord]:
    """The records of a file, and the steps that a killed process had closed and not written."""
    last: StepRecord | None = None
    for record in read_steps(path, notes):
        last = record
        yield record
    yield from unwritten_after(path, last)


def columns_with_unwritten(path: Path) -> Iterator[ColumnBlock]:
    """The numbers of with_unwritten; RecordError where a number is none that a column holds."""
    last: LineKey | None = None
    try:
        for block in read_columns(path, []):
            last = block.last
            yield block
        if records := unwritten_after(path, last):
            yield ColumnBlock([part_of_records(records)])
    except NotPlain as error:
        raise RecordError(f"{path}: {error} of some line is no number that a table holds") from error


def _blocks_of_file(path: Path, notes: list[str]) -> Iterator[NumberBlock]:
    """Those of with_unwritten."""
    last: LineKey | None = None
    for block in read_blocks(path, notes):
        last = block.last
        yield block
    records = unwritten_after(path, last)
    if records:
        yield StepBlock(records)


def _reduce(path: Path, blocks: Iterable[NumberBlock]) -> RankFile:
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
            if isinstance(part, StepBlock):  # columns hold nothing that does not fit
                check_block(path, part)
            if source not in builders:
                builders[source] = ColumnsBuilder(path, source, NamedKernels())
            builders[source].add(part)
    if first is None:
        raise ReportError(f"{path} holds no step")
    kernel_names = kernel_names_beside(path)
    try:
        columns = {source: builder.finished(kernel_names) for source, builder in builders.items()}
    except OverflowError as error:
        raise impossible_record(path, None) from error
    for source, rank_columns in columns.items():
        for wrong, describe in contradictions(rank_columns.metrics):
            if wrong.any():
                row = int(np.argmax(wrong))
                raise impossible_record(path, (source, int(rank_columns.global_step[row])), describe(row))
    return RankFile(path, first.rank, sizes[max(sizes)], columns, first.run_id)
