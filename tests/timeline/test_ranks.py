"""Ranks made by hand: true times on one clock, then written down on each rank's own."""

import numpy as np
import pytest

from aorta.timeline.collective import GroupKey
from aorta.timeline.common_clock import align
from aorta.timeline.intervals import EMPTY, intervals
from aorta.timeline.matching import UNKNOWN_SIZE, RankCalls
from aorta.timeline.waits import NOBODY, exposed_wait_ms, match_ranks

MS = 1_000_000
WORLD = GroupKey((0, 1), "0")


def calls(*rows, group=WORLD, exposed=EMPTY, offset_ns=0):
    """rows of op, bytes, start and end in ms."""
    ops, sizes, starts, ends = zip(*rows, strict=True)
    nothing = np.zeros(len(rows), dtype=np.int64)
    return RankCalls(
        kinds=[
            (op, UNKNOWN_SIZE if size is None else size, "", 2, "")
            for op, size in zip(ops, sizes, strict=True)
        ],
        groups=[group],
        row=nothing,
        kind=np.arange(len(rows)),
        group=nothing,
        seq=nothing,
        start_ns=np.array([round(t * MS) + offset_ns for t in starts]),
        end_ns=np.array([round(t * MS) + offset_ns for t in ends]),
        lead_ms=nothing * np.nan,
        exposed_ns=np.rint(exposed * MS).astype(np.int64) + offset_ns,
    )


def match(*of_ranks):
    return match_ranks(range(len(of_ranks)), of_ranks)


def waiting_ms(one, waits):
    """Exposed time of a rank in which nothing moves."""
    return exposed_wait_ms(one, waits, np.array([[one.start_ns.min(), one.end_ns.max()]]))[0]


def test_wait_lasts_until_the_last_rank_arrives_and_it_is_to_blame():
    """Rank 1 comes 3 ms late; 2 ms of transfer remain for both."""
    early = calls(("all_reduce", 4, 0, 5), exposed=intervals([(0, 5)]))
    late = calls(("all_reduce", 4, 3, 5), exposed=intervals([(3, 5)]))
    view = match(early, late)
    assert view.waits[0].wait_ms.tolist() == [3.0]
    assert view.waits[0].transfer_ms.tolist() == [2.0]
    assert view.waits[1].wait_ms.tolist() == [0.0]
    assert view.waits[1].late_rank.tolist() == [1]
    assert waiting_ms(early, view.waits[0]) == 3.0
    assert waiting_ms(late, view.waits[1]) == 0.0


def test_of_two_collectives_at_once_transfer_comes_first():
    one = calls(("all_reduce", 4, 0, 6), ("all_gather", 8, 2, 10), exposed=intervals([(0, 12)]))
    other = calls(("all_reduce", 4, 4, 6), ("all_gather", 8, 9, 10), exposed=EMPTY)
    view = match(one, other)
    # Transfer 4-6 and 9-10; waits 0-4 and 2-9 for rank 1; 10-12 belongs to no collective.
    assert waiting_ms(one, view.waits[0]) == 9.0 - 2.0


def sequence(num, seed=0, period=5):
    """A training-like sequence that repeats itself: op, bytes, start, end."""
    rng = np.random.default_rng(seed)
    kinds = [("all_gather", 1 << 25), ("all_gather", 1 << 24), ("reduce_scatter", 1 << 25), ("all_reduce", 4)]
    rows, now = [], 0.0
    for i in range(num):
        op, size = kinds[i % period % len(kinds)]
        now += rng.uniform(1.0, 3.0)
        rows.append((op, size, now, now + 0.5))
        now += 0.5
    return rows


@pytest.mark.parametrize(
    ("a", "b"),
    [
        pytest.param(slice(0, 100), slice(0, 100), id="equal"),
        pytest.param(slice(0, 100), slice(7, 100), id="starts-later"),
        pytest.param(slice(0, 93), slice(7, 100), id="starts-and-ends-later"),
        pytest.param(slice(5, 100), slice(0, 90), id="by-a-whole-period"),
        pytest.param(slice(0, 60), slice(40, 100), id="a-fifth-in-common"),
    ],
)
@pytest.mark.parametrize("offset_ns", [0, 3_600_000_000_000])
def test_sequences_that_start_apart(a, b, offset_ns):
    rows = sequence(100)
    view = match(calls(*rows[a]), calls(*rows[b], offset_ns=offset_ns))
    (group,) = view.groups
    first, second = range(*a.indices(100)), range(*b.indices(100))
    pairs = {(first[i], second[j]) for i, j in group.call.tolist() if i >= 0 and j >= 0}
    assert pairs == {(i, i) for i in set(first) & set(second)}


def test_holes_are_left_out_and_the_rest_is_matched():
    rows = [("all_gather", 8, t, t + 0.5) for t in np.cumsum([1.5] * 50)]
    with_holes = [row for i, row in enumerate(rows) if i not in (10, 30, 31)]
    view = match(calls(*rows), calls(*with_holes))
    call = view.groups[0].call
    assert np.flatnonzero(call[:, 1] < 0).tolist() == [10, 30, 31]
    assert view.num_matched == [47, 47]
    assert view.num_left == [3, 0]


def test_where_the_step_is_open_nothing_is_said_of_waits_and_clocks():
    """Steps exactly alike, one less on rank 1, and its clock is an hour ahead."""
    rows = [(op, 4, 10 * s + t, 10 * s + t + 1) for s in range(5) for t, op in enumerate(("ag", "ag", "rs"))]
    view = match(calls(*rows), calls(*rows[3:], offset_ns=3_600_000 * MS))
    assert view.num_matched == [0, 0]
    assert np.isnan(view.waits[0].wait_ms).all()
    assert not view.clock.offset_ns.any()
    assert view.clock.residual_us is None
    assert "rank 1: collectives align with those of rank 0 in more than one way" in " ".join(view.notes)


def test_what_is_unknown_equals_everything():
    """AMD's kernel names tell no operation, and the first kernels of a trace have no metadata."""
    named = calls(("all_reduce", 4, 0, 1), ("all_gather", 8, 2, 3))
    unnamed = calls(("unknown", None, 0, 1), ("all_gather", 8, 2, 3))
    unnamed.groups, unnamed.group[1] = [GroupKey(None, None), WORLD], 1
    assert match(named, unnamed).num_matched == [2, 2]


def test_groups_are_kept_apart():
    """Two pairs of ranks reduce at the same time; rank 1 and rank 3 are late in theirs."""
    pairs = {0: (0, 1), 1: (0, 1), 2: (2, 3), 3: (2, 3)}
    rows = [("all_reduce", 4, 2.0 if rank % 2 else 1.0, 3.0) for rank in range(4)]
    view = match(*(calls(rows[r], group=GroupKey(pairs[r], str(pairs[r][0]))) for r in range(4)))
    assert [w.late_rank.tolist() for w in view.waits] == [[1], [1], [3], [3]]


@pytest.mark.parametrize("op", ["broadcast", "reduce", "send_recv"])
def test_rooted_and_point_to_point_operations_have_no_wait(op):
    view = match(*(calls((op, 4, r, 5)) for r in (0, 1)))
    assert np.isnan(view.waits[0].wait_ms).all()


def test_a_group_with_a_rank_that_was_not_given_has_no_wait():
    group = GroupKey((0, 1, 2), "0")
    view = match(*(calls(("all_reduce", 4, r, 5), group=group) for r in (0, 1)))
    assert np.isnan(view.waits[0].wait_ms).all()
    assert "ranks that were not given" in view.notes[-1]


def test_a_rank_alone_has_no_waits():
    view = match(calls(("all_reduce", 4, 0, 5)))
    assert np.isnan(view.waits[0].wait_ms).all()
    assert view.clock.residual_us is None


def test_clocks_are_aligned_on_small_collectives():
    """Rank 1's clock is 250 µs ahead; large collectives end up to 300 µs apart, small ones 2 µs."""
    rng = np.random.default_rng(3)
    rows = {0: [], 1: []}
    for i in range(40):
        small = i % 2 == 0
        end = 10.0 * i + 5
        for rank in (0, 1):
            late = 1.0 if rank == 1 and i % 4 == 0 else 0.0
            jitter = rng.uniform(0, 0.002 if small else 0.3)
            size = 4 if small else 1 << 30
            rows[rank].append(("all_reduce", size, end - 2 + late, end + jitter))
    view = match(calls(*rows[0]), calls(*rows[1], offset_ns=250_000))
    assert view.clock.num_anchors == 20
    assert view.clock.offset_ns[1] == pytest.approx(-250_000, abs=1_500)
    assert view.clock.residual_us < 3
    wait = view.waits[0].wait_ms
    assert wait[::4] == pytest.approx(np.ones(10), abs=0.005)
    assert (view.waits[0].late_rank[::4] == 1).all()


def test_a_lead_below_the_residual_blames_nobody():
    rng = np.random.default_rng(0)
    rows = {r: [("all_reduce", 4, i, i + 0.5 + rng.uniform(0, 0.1)) for i in range(20)] for r in (0, 1)}
    rows[1] = [(op, size, start + 0.01, end) for op, size, start, end in rows[1]]
    view = match(*(calls(*rows[r]) for r in (0, 1)))
    assert view.clock.residual_us > 10
    assert set(view.waits[0].late_rank.tolist()) == {NOBODY}


def test_drift_over_a_long_run():
    """Rank 1's clock gains 20 µs a second, over 100 s."""
    true = np.arange(100, dtype=np.int64) * 1_000_000_000
    ends = np.stack((true, true + (true // 50_000)), axis=1)
    clock = align([0, 1], ends, np.ones_like(ends, dtype=bool))
    assert clock.drift[1] == pytest.approx(-2e-5, rel=1e-3)
    assert clock.residual_us < 1
    assert clock.aligned(1, ends[:, 1]) == pytest.approx(clock.aligned(0, ends[:, 0]), abs=2_000)


def test_one_clock_is_left_as_it_is():
    """Rank 1 is woken 2 ms behind rank 0: of two clocks it would be an offset."""
    true = np.arange(20, dtype=np.int64) * 5_000_000
    ends = np.stack((true, true + 2_000_000), axis=1)
    present = np.ones_like(ends, dtype=bool)
    assert align([0, 1], ends, present).offset_ns.tolist() == [0, -2_000_000]
    clock = align([0, 1], ends, present, is_one=True)
    assert (clock.offset_ns.tolist(), clock.residual_us) == ([0, 0], 2000)


def test_clocks_are_tied_through_a_chain_of_groups():
    """0-1 and 1-2 share collectives, 0 and 2 do not; 3 shares none."""
    true = np.arange(40, dtype=np.int64) * 5_000_000
    offset = np.array([0, 1_000_000, -2_000_000, 77])
    ends = true[:, None] + offset
    present = np.zeros((40, 4), dtype=bool)
    present[:20, :2] = True
    present[20:, 1:3] = True
    clock = align([0, 1, 2, 3], ends, present)
    assert clock.offset_ns[:3] == pytest.approx([0, -1_000_000, 2_000_000], abs=10)
    assert "not tied" in clock.notes[0]


def test_exposed_is_kept_in_the_clock_of_its_rank():
    early = calls(("all_reduce", 4, 0, 5), exposed=intervals([(1, 5)]), offset_ns=10**15)
    late = calls(("all_reduce", 4, 3, 5), offset_ns=10**15)
    view = match(early, late)
    assert waiting_ms(early, view.waits[0]) == 2.0
