"""Ranks of records matched by order: those made of traces number collectives from their own start."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from aorta.account.model import Run
from aorta.records.schema import StepRecord
from aorta.timeline.collective import GroupKey
from aorta.timeline.intervals import Intervals, intervals, of_run_lengths, subtract, union
from aorta.timeline.matching import RankCalls
from aorta.timeline.waits import RankView, match_ranks
from aorta.traces.model import NS_PER_MS

Row = tuple[RankCalls, NDArray[np.int64], dict[int, tuple[float, float]]]
"""Of one rank: its calls, the global step that issued each, and the steps' windows in ms from
RankCalls.origin_ns."""


def match_records(run: Run) -> tuple[list[RankCalls], RankView] | None:
    """The calls of every rank and how they match; None where a rank kept no step with its details."""
    rows = [calls_of_records(rank, run.records(rank)) for rank in run.ranks]
    calls = [row[0] for row in rows if row is not None]
    are_all = run.run is None or run.run.world_size <= len(run.ranks)
    return None if len(calls) < len(rows) else (calls, match_ranks(calls, are_all=are_all))


def calls_of_records(rank: int, records: Iterator[StepRecord]) -> Row | None:
    """The same for a rank's step records; None where it has none with details."""
    ops: list[str] = []
    groups: list[GroupKey] = []
    keys: dict[GroupKey, GroupKey] = {}
    sizes: list[int | None] = []
    times: list[tuple[int, int]] = []
    step_of: list[int] = []
    exposed: list[Intervals] = []
    windows: dict[int, tuple[float, float]] = {}
    origin: int | None = None
    for record in records:
        spans = _exposed_of(record)
        if record.collectives is None or spans is None:
            continue
        origin = record.start_unix_ns if origin is None else origin
        offset_ms = (record.start_unix_ns - origin) / NS_PER_MS
        windows[record.global_step] = (offset_ms, offset_ms + (record.step_ms or 0.0))
        exposed.append(spans + offset_ms)
        for collective in record.collectives:
            if collective.start_ms is None or collective.end_ms is None:
                continue
            ops.append(collective.op)
            # One object per group: comparing the ranks of a thousand takes long.
            key = GroupKey(tuple(collective.ranks) or None, collective.group or None)
            groups.append(keys.setdefault(key, key))
            sizes.append(collective.bytes)
            start_ns = record.start_unix_ns + round(collective.start_ms * NS_PER_MS)
            times.append((start_ns, start_ns + round((collective.end_ms - collective.start_ms) * NS_PER_MS)))
            step_of.append(record.global_step)
    if origin is None:
        return None
    start, end = np.array(times, dtype=np.int64).reshape(-1, 2).T
    order = np.argsort(start, kind="stable")
    calls = RankCalls(
        rank=rank,
        op=[ops[i] for i in order],
        group=[groups[i] for i in order],
        size_bytes=[sizes[i] for i in order],
        start_ns=start[order],
        end_ns=end[order],
        exposed=union(np.concatenate(exposed)),
        origin_ns=origin,
    )
    return calls, np.array(step_of, dtype=np.int64)[order], windows


def _exposed_of(record: StepRecord) -> Intervals | None:
    """Where communication was exposed; None where the record does not tell."""
    if record.active_segments is None:
        lengths_ns = record.exposed_run_lengths_ns
        return None if lengths_ns is None else of_run_lengths(lengths_ns) / NS_PER_MS
    comm, compute = [], []
    for segment in record.active_segments:
        span = (segment.start_ms, segment.end_ms)
        if "compute" in segment.active_streams:
            compute.append(span)
        if any(name not in ("compute", "copy") for name in segment.active_streams):
            comm.append(span)
    return subtract(intervals(comm), intervals(compute))
