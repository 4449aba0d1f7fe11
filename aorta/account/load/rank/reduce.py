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
from aorta.records.blocks import read_blocks
from aorta.records.reader import kernel_names_beside, read_steps
from aorta.records.schema import Source, StepRecord
from aorta.records.table import LineKey, LineTable, StepTable
from aorta.steps.process import unwritten_after

BLOCK_RECORDS = 512


@no_garbage_collection()  # nothing of a record refers to itself
def reduce_file(path: Path) -> RankFile:
    """The numbers of one rank_<n>_metrics.jsonl."""
    notes: list[str] = []
    reduced = _reduce(path, blocks_with_unwritten(path, notes))
    reduced.notes = notes
    return reduced


def reduce_records(path: Path, records: Iterable[StepRecord]) -> RankFile:
    """The numbers of the records of one rank. path: of its file, or of what else they were read from."""
    left = iter(records)
    return _reduce(path, (LineTable(block) for block in iter(lambda: list(islice(left, BLOCK_RECORDS)), [])))


def with_unwritten(path: Path, notes: list[str]) -> Iterator[StepRecord]:
    """The records of a file, and the steps that a killed process had closed and not written."""
    last: StepRecord | None = None
    for record in read_steps(path, notes):
        last = record
        yield record
    yield from unwritten_after(path, last)


def blocks_with_unwritten(path: Path, notes: list[str], *, whole: bool = False) -> Iterator[StepTable]:
    """The numbers of with_unwritten, many records at a time. whole: as in read_blocks."""
    last: LineKey | None = None
    for block in read_blocks(path, notes, whole=whole):
        last = block.last
        yield block
    if records := unwritten_after(path, last):
        yield LineTable(records)


def _reduce(path: Path, blocks: Iterable[StepTable]) -> RankFile:
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
