"""Two ranks' collectives by hand: which are the same is known, and no pair may be of two different ones."""

from functools import cache
from itertools import combinations

import numpy as np
import pytest

from aorta.timeline.sequences import CallSequence, align_sequences

MS = 1_000_000
HOUR = 3_600_000 * MS
GATHER, SCATTER = 0, 1
STEP = [(GATHER, 8, 5), (GATHER, 4, 1.2), (GATHER, 4, 1.2), (GATHER, 4, 7), (SCATTER, 4, 9), (SCATTER, 8, 12)]
"""Operation, bytes, and ms since the end before it."""
NUM_STEPS = 4
NUM = NUM_STEPS * len(STEP)
STEPS = [set(range(i, i + len(STEP))) for i in range(0, NUM, len(STEP))]
EVEN, UNEVEN = 0.0, 0.02
"""How far gaps vary from step to step. Where they do not, nothing in the ends tells steps apart."""
OFFSETS = pytest.mark.parametrize("offset_ns", [0, 2 * MS, -2 * MS, HOUR], ids=["0", "2ms", "-2ms", "1h"])


@cache  # thousands of pairs are of the same collectives
def true_ends(jitter):
    rng = np.random.default_rng(4)
    gaps = np.array([gap for _, _, gap in STEP] * NUM_STEPS) * (1 + jitter * rng.uniform(-1, 1, NUM))
    return np.cumsum(gaps)


@cache
def noise_of(rank):
    return np.random.default_rng(rank).uniform(0, 0.005, NUM)


def recorded(rank, kept, jitter, offset_ns=0, drift=0.0):
    """What a rank with this clock has of the true collectives: ends within 5 µs of each other."""
    ends = (true_ends(jitter) + noise_of(rank)) * (1 + drift) * MS
    op, size, _ = np.array(STEP * NUM_STEPS).T
    return CallSequence(
        op[kept].astype(np.int64),
        size[kept].astype(np.int64),
        10**18 + offset_ns + np.rint(ends[kept]).astype(np.int64),
        np.zeros(len(kept), dtype=bool),
    )


def paired(gone_a, gone_b, jitter, offset_ns=0, drift=0.0):
    """Pairs of true collectives, and whether it was left open."""
    a, b = (np.array([i for i in range(NUM) if i not in gone]) for gone in (gone_a, gone_b))
    found = align_sequences(recorded(0, a, jitter), recorded(1, b, jitter, offset_ns, drift))
    return list(zip(a[found.index_a].tolist(), b[found.index_b].tolist(), strict=True)), found.is_open


def in_common(gone_a, gone_b):
    return [(i, i) for i in range(NUM) if i not in gone_a | gone_b]


@pytest.mark.heavy
@OFFSETS
@pytest.mark.parametrize("jitter", [EVEN, UNEVEN])
def test_one_missing_leaves_all_others_matched(jitter, offset_ns):
    for gone in range(NUM):
        assert paired(set(), {gone}, jitter, offset_ns)[0] == in_common(set(), {gone}), gone


@pytest.mark.heavy
@OFFSETS
@pytest.mark.parametrize("jitter", [EVEN, UNEVEN])
def test_two_missing_on_one_rank(jitter, offset_ns):
    for gone in combinations(range(NUM), 2):
        assert paired(set(), set(gone), jitter, offset_ns)[0] == in_common(set(), set(gone)), gone


@pytest.mark.heavy
@OFFSETS
@pytest.mark.parametrize("jitter", [EVEN, UNEVEN])
def test_one_missing_on_each_rank_leaves_equal_numbers(jitter, offset_ns):
    for a, b in combinations(range(NUM), 2):
        assert paired({a}, {b}, jitter, offset_ns)[0] == in_common({a}, {b}), (a, b)


@OFFSETS
@pytest.mark.parametrize("drift", [0.0, 5e-5, -5e-5])
@pytest.mark.parametrize(
    ("gone_a", "gone_b"),
    [
        pytest.param(set(), STEPS[0], id="begins-a-step-later"),
        pytest.param(set(), STEPS[-1], id="ends-a-step-earlier"),
        pytest.param(STEPS[0], set(), id="begins-a-step-earlier"),
        pytest.param(STEPS[-1], STEPS[0], id="all-of-it-a-step-later"),
        pytest.param(set(), STEPS[0] | {9}, id="begins-a-step-later-and-lacks-one"),
        pytest.param({9}, STEPS[-1], id="ends-a-step-earlier-and-the-other-lacks-one"),
    ],
)
def test_windows_that_are_a_step_apart(gone_a, gone_b, drift, offset_ns):
    assert paired(gone_a, gone_b, UNEVEN, offset_ns, drift)[0] == in_common(gone_a, gone_b)


@pytest.mark.parametrize("offset_ns", [0, 2 * MS, -2 * MS])
def test_of_even_steps_clocks_that_nearly_agree_tell_which_is_which(offset_ns):
    for gone_a, gone_b in ((set(), STEPS[0]), (set(), STEPS[-1]), (STEPS[-1], STEPS[0])):
        assert paired(gone_a, gone_b, EVEN, offset_ns)[0] == in_common(gone_a, gone_b)


def test_even_steps_on_clocks_far_apart_are_left_open():
    for gone in (STEPS[0], STEPS[-1], STEPS[0] | {9}):
        assert paired(set(), gone, EVEN, HOUR) == ([], True)


def test_a_clock_that_runs_wildly_fast_is_not_taken_for_a_step():
    """By 1 %: over one step ends scatter less than over all."""
    assert paired(set(), set(), UNEVEN, drift=0.01)[0] in ([], in_common(set(), set()))


@pytest.mark.heavy
def test_drift_over_a_long_time_with_holes():
    """50 µs a second over 100 s: ends come to lie further apart than collectives do."""
    rng = np.random.default_rng(0)
    end = np.cumsum(rng.uniform(1, 9, 20_000)) * MS
    op = np.tile([0, 0, 1, 0, 1], 4_000)
    kept = np.setdiff1d(np.arange(len(op)), [70, 9_000, 15_000])
    size, loose = np.full(len(op), 4), np.zeros(len(op), dtype=bool)
    a = CallSequence(op, size, np.rint(end).astype(np.int64), loose)
    b = CallSequence(op[kept], size[kept], np.rint(end[kept] * (1 + 5e-5)).astype(np.int64), loose[kept])
    found = align_sequences(a, b)
    assert (kept[found.index_b] == found.index_a).all()
    assert len(found.index_a) == len(kept)
