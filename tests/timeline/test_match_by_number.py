"""Records match by the number of a collective in its group; both ways of matching give the same waits."""

import numpy as np
import pytest

from aorta.timeline.collective import GroupKey
from aorta.timeline.common_clock import FEW_SMALL, clock_of
from aorta.timeline.matching import RankCalls, match_by_number
from aorta.timeline.waits import NOBODY, match_numbered, match_ranks

WORLD = GroupKey((0, 1), "0")
MS = 1_000_000


def numbered(starts_ms, ends_ms, seq=None, ops=("all_reduce",), size=4, key=WORLD):
    num = len(starts_ms)
    nothing = np.zeros(num, dtype=np.int32)
    return RankCalls(
        kinds=[(op, size, "", 2, "") for op in ops],
        groups=[key],
        row=nothing,
        kind=nothing,
        group=nothing,
        seq=np.arange(num) if seq is None else np.array(seq),
        start_ns=(np.array(starts_ms) * MS).astype(np.int64),
        end_ns=(np.array(ends_ms) * MS).astype(np.int64),
        lead_ms=nothing * np.nan,
        exposed_ns=np.zeros((0, 2), dtype=np.int64),
    )


def test_collectives_match_by_number_wherever_the_ranks_begin() -> None:
    calls = [numbered([0, 10, 20], [5, 15, 25], seq=[0, 1, 2]), numbered([11, 21], [15, 25], seq=[1, 2])]
    (group,) = match_by_number([0, 1], calls)
    assert group.call.tolist() == [[1, 0], [2, 1]]
    assert group.is_whole


def test_a_group_with_a_rank_that_is_not_given_is_left_out() -> None:
    key = GroupKey((0, 1, 2), "0")
    assert match_by_number([0, 1], [numbered([0], [1], key=key), numbered([0], [1], key=key)]) == []


def test_the_same_number_of_another_operation_is_no_match() -> None:
    calls = [numbered([0], [1]), numbered([0], [1], ops=("all_gather",))]
    assert match_by_number([0, 1], calls) == []


def test_matched_by_number_or_by_order_the_waits_are_the_same() -> None:
    """Rank 1 comes 2 ms late to every collective; its clock is 7 ms ahead."""
    starts = [np.arange(0, 100, 10.0), np.arange(0, 100, 10.0) + 9]
    ends = [np.arange(0, 100, 10.0) + 5, np.arange(0, 100, 10.0) + 12]
    calls = [numbered(start, end) for start, end in zip(starts, ends, strict=True)]
    by_number, by_order = match_numbered([0, 1], calls, is_one_clock=False), match_ranks([0, 1], calls)
    assert by_number.clock.offset_ns == pytest.approx(by_order.clock.offset_ns)
    for one_way, other_way in zip(by_number.waits, by_order.waits, strict=True):
        assert one_way.wait_ms == pytest.approx(other_way.wait_ms)
        assert one_way.late_rank.tolist() == other_way.late_rank.tolist()
    waits = by_number.waits
    assert waits[0].wait_ms == pytest.approx(np.full(10, 2.0))
    assert waits[0].late_rank.tolist() == [1] * 10
    assert NOBODY not in waits[0].late_rank


def test_large_collectives_stand_in_where_few_are_small() -> None:
    calls = [numbered(np.arange(8.0), np.arange(8.0) + 0.5, size=1 << 30) for _ in range(2)]
    clock = clock_of([0, 1], calls, match_by_number([0, 1], calls))
    assert FEW_SMALL in clock.notes
    assert clock.num_anchors == 8
