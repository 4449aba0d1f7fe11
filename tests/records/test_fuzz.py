"""Bytes that nobody wrote by hand, for each small reader of a run's folder; benchmarks read many more."""

import random
import time
from pathlib import Path

import pytest

from tests.records.fuzzed_readers import READERS, fuzzed
from tests.traces.mutations import mutated_bytes, mutated_json

NUM_INPUTS = 60


@pytest.mark.parametrize("name", READERS)
def test_no_reader_crashes(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: None)  # it looks again where a file is half written
    good = READERS[name].good
    if name not in ("unwritten", "counts"):
        assert fuzzed(name, tmp_path, good) == "read"
    rng = random.Random(name)
    for number in range(NUM_INPUTS):
        mutate = (
            mutated_json if number % 2 and good.startswith(b"{") and good.count(b"\n") < 1 else mutated_bytes
        )
        fuzzed(name, tmp_path, mutate(good, rng))
