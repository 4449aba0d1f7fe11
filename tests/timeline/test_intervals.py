"""Interval arithmetic against a count of integer ticks, which needs no cleverness."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aorta.timeline.intervals import (
    clip,
    concat,
    intersect,
    intervals,
    length_ms,
    subtract,
    union,
)

TICKS = 40
spans = st.lists(st.tuples(st.integers(0, TICKS), st.integers(0, TICKS)), max_size=12)


def ticks(rows):
    return {tick for start, end in rows for tick in range(int(start), int(end))}


def is_normalised(a):
    return bool((a[:, 1] > a[:, 0]).all() and (a[1:, 0] > a[:-1, 1]).all())


@pytest.mark.heavy
@given(spans)
def test_union_is_the_set_of_ticks(a):
    result = union(intervals(a))
    assert ticks(result) == ticks(a)
    assert is_normalised(result)
    assert length_ms(result) == len(ticks(a))


@pytest.mark.heavy
@given(spans, spans)
def test_intersect_and_subtract_are_set_operations_on_ticks(a, b):
    both = intersect(intervals(a), intervals(b))
    only = subtract(intervals(a), intervals(b))
    assert ticks(both) == ticks(a) & ticks(b)
    assert ticks(only) == ticks(a) - ticks(b)
    assert is_normalised(both)
    assert is_normalised(only)


@pytest.mark.heavy
@given(spans, st.integers(0, TICKS), st.integers(0, TICKS))
def test_clip_keeps_the_ticks_of_the_window(a, lo, length):
    result = clip(intervals(a), lo, lo + length)
    assert ticks(result) == ticks(a) & set(range(lo, lo + length))


@pytest.mark.heavy
@given(st.lists(st.tuples(st.floats(0, 1e5), st.floats(0, 1e5)), max_size=30))
def test_any_floats_give_a_normalised_union(a):
    assert is_normalised(union(intervals(a)))


@pytest.mark.parametrize(
    ("a", "expected"),
    [
        pytest.param([], [], id="nothing"),
        pytest.param([(3, 3)], [], id="empty-span"),
        pytest.param([(5, 4)], [], id="backwards-span-is-empty"),
        pytest.param([(0, 2), (2, 3)], [(0, 3)], id="touching-spans-join"),
        pytest.param([(0, 9), (1, 2), (3, 4)], [(0, 9)], id="contained"),
        pytest.param([(4, 5), (0, 1)], [(0, 1), (4, 5)], id="out-of-order"),
        pytest.param([(0, 4), (0, 4)], [(0, 4)], id="twice"),
    ],
)
def test_union(a, expected):
    assert union(intervals(a)).tolist() == [list(row) for row in expected]


def test_inputs_are_left_as_they_were():
    a = intervals([(4, 5), (0, 1)])
    before = a.copy()
    union(a)
    intersect(a, a)
    assert np.array_equal(a, before)


def test_concat_of_nothing_is_empty():
    assert length_ms(union(concat())) == 0.0
