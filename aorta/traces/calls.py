"""The collectives of a trace as aorta.ranks.waits matches them."""

import numpy as np

from aorta.ranks.waits import GroupKey, RankCalls
from aorta.timeline.intervals import subtract, union
from aorta.timeline.types import Kind
from aorta.traces.model import NS_PER_MS, RankTrace


def rank_calls(trace: RankTrace) -> RankCalls:
    line = trace.timeline
    found = trace.collectives
    keys: dict[tuple[tuple[int, ...] | None, str | None], GroupKey] = {}
    for one in found:
        ranks = None if one.ranks is None else tuple(one.ranks)
        keys.setdefault((ranks, one.group), GroupKey(ranks, one.group))
    start_ms = np.array([one.start_ms for one in found])
    end_ms = np.array([one.end_ms for one in found])
    return RankCalls(
        rank=trace.rank,
        op=[one.op for one in found],
        group=[keys[None if one.ranks is None else tuple(one.ranks), one.group] for one in found],
        size_bytes=[one.bytes for one in found],
        start_ns=line.origin_unix_ns + np.rint(start_ms * NS_PER_MS).astype(np.int64),
        end_ns=line.origin_unix_ns + np.rint(end_ms * NS_PER_MS).astype(np.int64),
        exposed=subtract(
            union(line.intervals(line.kind == Kind.COMM)), union(line.intervals(line.kind == Kind.COMPUTE))
        ),
        origin_ns=line.origin_unix_ns,
    )
