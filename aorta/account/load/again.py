"""Reads again what a run does not hold of its ranks: records of single steps, kernels, stacks, call sites."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from aorta.account.load.rank.columns import RankFile, RankSteps
from aorta.account.load.rank.kernels import named_spans
from aorta.account.load.rank.reduce import blocks_with_unwritten, with_unwritten
from aorta.account.model import NamedSpan
from aorta.records.files import sites_name, stacks_name, workers_name
from aorta.records.reader import kernel_names_beside, read_beside
from aorta.records.schema import CallSites, StepRecord
from aorta.records.stacks import Stacks, joined, read_stacks
from aorta.records.table import StepTable
from aorta.records.workers import WorkerChunk, read_workers
from aorta.timeline.arrays import Flags, Ints
from aorta.timeline.types import Source


def places_of(steps: Ints, of_rank: RankSteps) -> tuple[NDArray[np.intp], Flags]:
    """The row of each step among a rank's, and whether the rank has it: else the row is another one's."""
    places = np.minimum(np.searchsorted(of_rank.global_step, steps), len(of_rank.global_step) - 1)
    return places, of_rank.global_step[places] == steps


def columns_of_rank(files: dict[int, RankFile], source: Source, rank: int) -> Iterator[StepTable]:
    """The numbers of records_of, from columns where there are some."""
    done = files[rank].sources[source]
    for block in blocks_with_unwritten(files[rank].path, [], whole=True, left_out=files[rank].left_out):
        if source not in block.sources():
            continue
        of_source = block.of_source(source)
        place, counts = places_of(of_source.integers("global_step"), done)
        for name in ("attempt", "rollbacks"):
            counts &= getattr(done, name)[place] == of_source.integers(name)
        if counts.any():
            yield of_source.chosen(counts)


def records_of(files: dict[int, RankFile], source: Source, rank: int) -> Iterator[StepRecord]:
    """Records of a rank; of steps that were done more than once, those that count."""
    done = files[rank].sources[source]
    passes = done.passes
    return (
        record
        for record in with_unwritten(files[rank].path, [], left_out=files[rank].left_out)
        if record.source == source and passes.get(record.global_step) == (record.attempt, record.rollbacks)
    )


def stacks_of(files: dict[int, RankFile], notes: list[str], rank: int) -> Stacks:
    file = files[rank]
    return joined(read_stacks(file.path.with_name(stacks_name(rank)), file.run_id, notes))


def sites_of(files: dict[int, RankFile], notes: list[str], rank: int) -> CallSites | None:
    file = files[rank]
    return read_beside(file.path.with_name(sites_name(rank)), CallSites, file.run_id, notes)


def workers_of(files: dict[int, RankFile], rank: int) -> list[WorkerChunk]:
    file = files[rank]
    return read_workers(file.path.with_name(workers_name(rank)), file.run_id)


def missing_beside(ranks: Iterable[RankFile], names: set[str]) -> Iterator[str]:
    """A note per kind of file that some of the ranks have and others have not."""
    for name_of in (stacks_name, sites_name):
        absent = [rank.rank for rank in ranks if name_of(rank.rank) not in names]
        if absent and any(name_of(rank.rank) in names for rank in ranks):
            more = f" and {len(absent) - 1} more" if len(absent) > 1 else ""
            yield f"{name_of(absent[0])}{more} is missing, other ranks have theirs"


def kernels_of(files: dict[int, RankFile], rank: int) -> Iterator[tuple[int, list[NamedSpan]]]:
    """Of the steps whose lines keep every kernel."""
    names = kernel_names_beside(files[rank].path)
    for record in records_of(files, "kernels", rank):
        if record.kernels is not None and record.kernels.spans is not None:
            yield record.global_step, named_spans(record, names)


def kernel_names(paths: Iterable[Path]) -> set[str]:
    return {name for path in paths for name in kernel_names_beside(path)}
