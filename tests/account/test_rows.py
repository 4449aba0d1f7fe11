"""Percentiles of rows by blocks are numpy's, to the last digit."""

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aorta.account import rows
from aorta.account.load.arrays import ArrayFile, Arrays
from aorta.account.load.rank.columns import RankSteps


@pytest.mark.filterwarnings("ignore:All-NaN")
@given(
    shape=st.tuples(st.integers(1, 9), st.integers(1, 700)),
    share_unknown=st.sampled_from([0.0, 0.1, 0.9]),
    percent=st.sampled_from([0.0, 50.0, 95.0, 99.9, 100.0]),
    seed=st.integers(0, 2**32),
)
def test_percentiles_of_rows_are_those_of_numpy(shape, share_unknown, percent, seed):
    rng = np.random.default_rng(seed)
    values = rng.lognormal(0, 3, shape)
    values[rng.random(shape) < share_unknown] = np.nan
    before = values.copy()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "BLOCK_NUMBERS", 1000)
        medians, percentiles = rows.row_medians_and_percentile(values, percent)
        (alone,) = rows.row_percentiles(values, (percent,))
    assert np.array_equal(medians, np.nanmedian(values, axis=1), equal_nan=True)
    assert np.array_equal(percentiles, np.nanpercentile(values, percent, axis=1), equal_nan=True)
    assert np.array_equal(alone, percentiles, equal_nan=True)
    assert np.array_equal(values, before, equal_nan=True)


def test_blocks_are_all_rows_once_and_one_row_at_least():
    for shape in ((7, rows.BLOCK_NUMBERS * 3), (1000, 900), (3, 5)):
        covered = np.zeros(shape[0], dtype=int)
        for block in rows.row_blocks(shape):
            covered[block] += 1
        assert (covered == 1).all()
    assert len(list(rows.row_blocks((7, rows.BLOCK_NUMBERS * 3)))) == 7


@pytest.mark.parametrize("in_file", [False, True])
def test_an_array_is_derived_from_others_block_by_block(monkeypatch, in_file):
    monkeypatch.setattr(rows, "BLOCK_NUMBERS", 8)
    arrays = Arrays((5, 4), ArrayFile() if in_file else None)
    values = np.arange(20.0).reshape(5, 4)
    arrays["a"], arrays["b"] = values, np.full((5, 4), 2.0)
    arrays.derive("sum", np.add, "a", "b")
    arrays.derive("a", np.multiply, "a", "b")
    arrays.derive("b", lambda b: b, "b")
    assert np.array_equal(arrays["sum"], values + 2)
    assert np.array_equal(arrays["a"], 2 * values)
    assert np.array_equal(arrays["b"], np.full((5, 4), 2.0))


@pytest.mark.parametrize("in_file", [False, True])
def test_first_rows_and_columns_are_chosen_of_every_array(in_file):
    arrays = Arrays((3, 4), ArrayFile() if in_file else None)
    arrays["a"], arrays["b"] = np.arange(12.0).reshape(3, 4), np.full((3, 4), np.nan)
    chosen = arrays.chosen(2, np.array([0, 3]))
    assert np.array_equal(chosen["a"], [[0.0, 3.0], [4.0, 7.0]])
    assert np.isnan(chosen["b"]).all()
    assert arrays.chosen(3, np.arange(4)) is arrays


def test_columns_of_one_value_travel_as_that_value():
    num = 100_000
    flags, ones = np.zeros(num, dtype=bool), np.ones(num, dtype=np.int64)
    numbers = {
        "unknown": np.full(num, np.nan),
        "step_ms": np.arange(num, dtype=float),
        "num_collectives": ones,
    }
    steps = RankSteps(
        ones,
        np.arange(num),
        ones,
        ones,
        {3: [(0, 0)]},
        [(5, "why")],
        flags,
        flags,
        flags,
        flags,
        {},
        None,
        {},
        numbers,
    )
    packed = pickle.dumps(steps)
    arrived = pickle.loads(packed)
    assert len(packed) < 16 * num + 5000
    assert (arrived.repeated, arrived.gaps) == (steps.repeated, steps.gaps)
    assert arrived.rollbacks.strides == arrived.numbers["unknown"].strides == (0,)
    for name, values in numbers.items():
        assert np.array_equal(arrived.numbers[name], values, equal_nan=True)
    assert np.array_equal(arrived.attempt, steps.attempt)
