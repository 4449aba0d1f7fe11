"""Intervals of many rows at once are those of each row alone, to the last digit."""

import numpy as np
import pytest

from aorta.timeline import intervals as one
from aorta.timeline import row_intervals as many
from aorta.timeline.row_intervals import RowIntervals

NUM_ROWS = 40


def random_spans(rng):
    """Rows without spans, touching ones, empty ones and those that end before they start among them."""
    row = np.sort(rng.integers(0, NUM_ROWS, 400)) // 2 * 2
    start = rng.uniform(0, 100, len(row))
    end = start + rng.choice([-1.0, 0.0, 0.3, 10.0], len(row)) * rng.random(len(row))
    is_whole = rng.random(len(row)) < 0.3
    return RowIntervals(
        row, np.where(is_whole, np.round(start), start), np.where(is_whole, np.round(end), end)
    )


def spans_of(spans, row):
    is_of_row = spans.row == row
    return one.pairs(spans.start[is_of_row], spans.end[is_of_row])


def assert_alike(spans, expected):
    for row in range(NUM_ROWS):
        assert spans_of(spans, row).tolist() == expected(row).tolist()
    lengths = many.lengths_ms(spans, NUM_ROWS).tolist()
    assert lengths == [one.length_ms(spans_of(spans, row)) for row in range(NUM_ROWS)]


@pytest.mark.parametrize("seed", range(5))
def test_rows_are_those_of_intervals_alone(seed):
    rng = np.random.default_rng(seed)
    a, b = random_spans(rng), random_spans(rng)
    a_union, b_union = many.union(a), many.union(b)
    lo, hi = rng.uniform(0, 60, NUM_ROWS), rng.uniform(30, 100, NUM_ROWS)

    assert_alike(a_union, lambda row: one.union(spans_of(a, row)))
    assert_alike(
        many.intersect(a_union, b_union), lambda row: one.intersect(spans_of(a, row), spans_of(b, row))
    )
    assert_alike(
        many.subtract(a_union, b_union), lambda row: one.subtract(spans_of(a, row), spans_of(b, row))
    )
    assert_alike(many.clip(a_union, lo, hi), lambda row: one.clip(spans_of(a_union, row), lo[row], hi[row]))
    both = many.union(many.concat(a, b))
    assert_alike(both, lambda row: one.union(one.concat(spans_of(a, row), spans_of(b, row))))


def test_nothing_of_nothing():
    assert len(many.union(RowIntervals.of([(0, 2.0, 1.0)]))) == 0
    assert many.lengths_ms(many.NONE, 3).tolist() == [0.0, 0.0, 0.0]
    some = many.union(RowIntervals.of([(1, 1.0, 2.0)]))
    assert many.subtract(some, many.NONE) == some
    assert len(many.intersect(some, many.NONE)) == 0
