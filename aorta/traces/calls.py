"""The collectives of a trace as aorta.timeline.matching matches them."""

import numpy as np

from aorta.timeline.collective import GroupKey
from aorta.timeline.intervals import subtract, union
from aorta.timeline.matching import RankCalls
from aorta.timeline.types import Kind
from aorta.traces.model import NS_PER_MS, RankTrace


def rank_calls(trace: RankTrace) -> RankCalls:
    line = trace.timeline
    collectives = trace.collectives
    keys: dict[tuple[tuple[int, ...] | None, str | None], GroupKey] = {}
    for call in collectives:
        ranks = None if call.ranks is None else tuple(call.ranks)
        keys.setdefault((ranks, call.group), GroupKey(ranks, call.group))
    start_ms = np.array([call.start_ms for call in collectives])
    end_ms = np.array([call.end_ms for call in collectives])
    return RankCalls(
        rank=trace.rank,
        op=[call.op for call in collectives],
        group=[keys[None if call.ranks is None else tuple(call.ranks), call.group] for call in collectives],
        size_bytes=[call.bytes for call in collectives],
        start_ns=line.origin_unix_ns + np.rint(start_ms * NS_PER_MS).astype(np.int64),
        end_ns=line.origin_unix_ns + np.rint(end_ms * NS_PER_MS).astype(np.int64),
        exposed=subtract(
            union(line.intervals(line.kind == Kind.COMM)), union(line.intervals(line.kind == Kind.COMPUTE))
        ),
        origin_ns=line.origin_unix_ns,
    )
