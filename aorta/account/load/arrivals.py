"""Who came last to the collectives of a run, what that cost the others, and how long each call waited."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from aorta.account.load.sides import Sides
from aorta.account.load.waits import MatchedRanks
from aorta.account.model import Arrivals, CallWaits

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class RankWaits(NamedTuple):
    """The collectives of one rank, matched with those of the others."""

    start_ns: Ints
    """On the rank's own clock."""
    column: NDArray[np.integer[Any]]
    """Of the step that issued each; -1 for none of those that are shown."""
    num_ranks: Ints
    """Of its group."""
    wait_ms: Floats
    """NaN where it was not matched on all ranks, is rooted or point to point."""
    late_rank: Ints
    """Who came last, by more than the clocks may be off; another number where that is not known."""


def arrivals_of_records(ranks: Sequence[int], sides: Sides, matched: MatchedRanks | None) -> Arrivals | None:
    """None where no collective was matched."""
    if matched is None or not matched.num_matched:
        return None
    of_ranks = []
    for calls, waits in zip(sides.calls or (), matched.waits, strict=True):
        sizes = np.array([len(group.ranks or ()) for group in calls.groups], dtype=np.int64)
        num_ranks = sizes[calls.group] if len(sizes) else np.zeros(0, dtype=np.int64)
        of_ranks.append(RankWaits(calls.start_ns, calls.row, num_ranks, waits.wait_ms, waits.late_rank))
    return arrivals(ranks, of_ranks, sides.metrics.shape[1], matched.clock.residual_us)


def arrivals(
    ranks: Sequence[int], of_ranks: Sequence[RankWaits], num_steps: int, residual_us: float | None
) -> Arrivals:
    """ranks in increasing order, of_ranks in the same one."""
    shape = (len(ranks), num_steps)
    num_last, num_judged = np.zeros(shape, dtype=np.int32), np.zeros(shape, dtype=np.int32)
    caused_ms = np.zeros(shape)
    known_ranks = np.array(ranks, dtype=np.int64)
    waits = {}
    for row, (rank, calls) in enumerate(zip(ranks, of_ranks, strict=True)):
        is_matched = np.isfinite(calls.wait_ms)
        order = np.argsort(calls.start_ns[is_matched], kind="stable")
        waits[rank] = CallWaits(calls.start_ns[is_matched][order], calls.wait_ms[is_matched][order])
        is_shown = is_matched & (calls.column >= 0)
        column, late = calls.column[is_shown], calls.late_rank[is_shown]
        np.add.at(num_judged[row], column, 1)
        np.add.at(num_last[row], column[late == rank], 1)
        blamed = np.searchsorted(known_ranks, late).clip(max=len(ranks) - 1)
        is_victim = (known_ranks[blamed] == late) & (late != rank)
        num_others = np.maximum(calls.num_ranks[is_shown] - 1, 1)[is_victim]
        shares_ms = calls.wait_ms[is_shown][is_victim] / num_others
        np.add.at(caused_ms, (blamed[is_victim], column[is_victim]), shares_ms)
    return Arrivals(num_last, num_judged, caused_ms, waits, residual_us)
