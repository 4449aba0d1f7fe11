"""Reduces the record file of one rank to its columns, block by block."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np

from aorta.errors import RecordError, ReportError
from aorta.garbage import no_garbage_collection
from aorta.records.blocks import Numbers, StepBlock, read_blocks
from aorta.records.files import STEPS_FILE, kernels_name, unwritten_name
from aorta.records.reader import read_kernel_names, read_steps
from aorta.records.schema import Source, StepRecord
from aorta.report.load.rank.builder import ColumnsBuilder, by_source
from aorta.report.load.rank.columns import RankFile
from aorta.report.load.rank.contradictions import contradictions, impossible_record
from aorta.steps.unwritten import unwritten_steps

BLOCK_RECORDS = 512
COLUMNS_VERSION = 1
"""Raised with every change of what columns are made of lines, or of how they are stored."""


def reduce_file(path: Path) -> RankFile:
    """The numbers of one rank_<n>_metrics.jsonl."""
    notes: list[str] = []
    with no_garbage_collection():  # nothing of a record refers to itself
        reduced = _reduce(path, _blocks_of_file(path, notes), kernel_names_beside(path))
    reduced.notes = notes
    return reduced


def _blocks_of_file(path: Path, notes: list[str]) -> Iterator[StepBlock]:
    last: Numbers | None = None
    for block in read_blocks(path, notes):
        last = block.records[-1]
        yield block
    yield from _blocks(_unwritten(path, last))


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
    yield from _unwritten(path, last)


def _unwritten(path: Path, last: Numbers | None) -> Iterable[StepRecord]:
    named = STEPS_FILE.fullmatch(path.name)
    if named is None:
        return ()
    unwritten_path = path.with_name(unwritten_name(int(named[1])))
    if last is None:
        return unwritten_steps(unwritten_path, None, None)
    return unwritten_steps(unwritten_path, (last.run_id, last.attempt), (last.rollbacks, last.global_step))


def reduce_records(path: Path, records: Iterable[StepRecord], kernel_names: Sequence[str] = ()) -> RankFile:
    """The numbers of the records of one rank. kernel_names: what their kernels refer to."""
    return _reduce(path, _blocks(records), kernel_names)


def _blocks(records: Iterable[StepRecord]) -> Iterator[StepBlock]:
    left = iter(records)
    while block := list(islice(left, BLOCK_RECORDS)):
        yield StepBlock(block)


def _reduce(path: Path, blocks: Iterable[StepBlock], kernel_names: Sequence[str]) -> RankFile:
    building: dict[Source, ColumnsBuilder] = {}
    first: Numbers | None = None
    sizes: dict[int, int] = {}
    for block in blocks:
        first = first or block.records[0]
        for attempt, rank, size in dict.fromkeys(
            zip(*(block.values[name] for name in ("attempt", "rank", "world_size")), strict=True)
        ):
            size_before = sizes.setdefault(attempt, size)
            if (rank, size) != (first.rank, size_before):
                raise RecordError(
                    f"{path} mixes runs: rank {first.rank} of {size_before} and rank {rank} of {size}"
                )
        for source, part in by_source(block):
            building.setdefault(source, ColumnsBuilder(path, source)).add(part)
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
