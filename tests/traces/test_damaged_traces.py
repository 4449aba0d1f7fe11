"""Damaged traces give a run or one clear line: no traceback, no hang."""

from functools import partial

import pytest

from tests.traces.mutations import Mutations, load, outcome


@pytest.mark.heavy
def test_damaged_traces(tmp_path):
    mutations = Mutations(tmp_path, seed=7)
    outcomes = []
    for number in range(400):
        _, folder = mutations.make(number)
        outcomes.append(outcome(partial(load, folder)))
    assert 50 < outcomes.count("read") < 390
