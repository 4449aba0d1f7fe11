"""Reduces the trace of one rank to its numbers, one trace at a time."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from aorta.account.load.evidence import possible_comm_ms
from aorta.account.load.rank.columns import RankFile
from aorta.account.load.rank.kernels import kernel_name
from aorta.account.load.rank.reduce import reduce_records
from aorta.account.load.traces.steps import step_records, windows_of
from aorta.account.model import NamedSpan, Progress
from aorta.records.schema import StepRecord
from aorta.timeline.matching import RankCalls
from aorta.timeline.overlap import total
from aorta.timeline.types import Kind, Total
from aorta.timeline.types import Source as RecordSource
from aorta.traces.classify import kernel_class
from aorta.traces.model import NS_PER_MS, RankTrace, rank_calls
from aorta.traces.quality import Finding, RankFacts, facts, truncated, verdict
from aorta.traces.sources import Source, map_ranks
from aorta.traces.steps import Reading


@dataclass(slots=True)
class RankSummary:
    """Numbers of the trace of one rank."""

    rank: int
    world_size: int | None
    device: str | None
    host: str | None
    versions: dict[str, str]
    sums: Total
    """Over the whole window."""
    columns: RankFile
    """Numbers of every step."""
    calls: RankCalls
    findings: list[Finding]
    facts: RankFacts
    truncated: dict[int, str]
    devices: tuple[str, ...]
    untimed: dict[str, str]
    """As in RankTrace."""
    possible_comm_ms: dict[str, float]
    updates: bool
    libraries: frozenset[str]
    """All three as in Run."""
    optimizer_ns: Counter[str]
    """By name, how long the host is in it."""


def reduce_ranks(
    source: Source,
    label: str = "",
    *,
    jobs: int | None = 1,
    dask: str | None = None,
    progress: Progress | None = None,
    reading: Reading = Reading(),  # noqa: B008 (frozen)
) -> Iterator[RankSummary]:
    """Every rank's numbers, in order of ranks; one trace at a time and process."""
    world_size = source.world_size or len(source.ranks)
    reduce = partial(reduce_rank, world_size=world_size, reading=reading)
    for num_done, summary in enumerate(map_ranks(reduce, source, jobs=jobs, dask=dask), start=1):
        if progress is not None:
            progress(label, num_done, len(source.ranks))
        yield summary


def reduce_rank(
    source: Source,
    rank: int,
    *,
    world_size: int,
    reading: Reading = Reading(),  # noqa: B008 (frozen)
) -> RankSummary:
    trace = reading.read(source, rank)
    sums = total(trace.timeline)
    columns, calls = (
        reduce_records(Path(source.files[rank].name), step_records(trace, world_size)),
        rank_calls(trace),
    )
    # Those of no step are matched, too: they may run in a step's window.
    columns.sources = {of: replace(steps, calls=calls) for of, steps in columns.sources.items()}
    return RankSummary(
        rank=rank,
        world_size=trace.world_size,
        device=trace.device,
        host=trace.host,
        versions=trace.versions,
        sums=sums,
        columns=columns,
        calls=calls,
        findings=verdict(trace, sums),
        facts=facts(trace, sums),
        truncated=truncated(trace),
        devices=trace.devices,
        untimed=trace.untimed,
        possible_comm_ms=possible_comm_ms(trace),
        updates=any(kernel_class(name) == "optimizer" for name in trace.timeline.names),
        libraries=trace.libraries,
        optimizer_ns=_optimizer_ns(trace),
    )


def _optimizer_ns(trace: RankTrace) -> Counter[str]:
    ns = Counter[str]()
    for span in trace.host_spans:
        if span.kind == "optimizer" and span.where:
            ns[span.where] += round(NS_PER_MS * (span.end_ms - span.start_ms))
    return ns


def records_of(
    source: Source, world_size: int, reading: Reading, _source: RecordSource, rank: int
) -> Iterator[StepRecord]:
    """One rank's steps with all their details, read again."""
    return step_records(reading.read(source, rank), world_size)


def kernels_of(source: Source, reading: Reading, rank: int) -> Iterator[tuple[int, list[NamedSpan]]]:
    """One rank's kernels that are not communication, in the window of each step, read again."""
    trace = reading.read(source, rank)
    for step, window in windows_of(trace):
        line = trace.timeline.clipped(window[0], max(window))
        is_compute = np.flatnonzero(line.kind == Kind.COMPUTE)
        names = [kernel_name(name) for name in line.names]
        yield (
            step,
            [
                (float(line.start_ms[i] - window[0]), float(line.end_ms[i] - window[0]), names[line.name[i]])
                for i in is_compute.tolist()
            ],
        )
