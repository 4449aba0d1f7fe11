"""Which ranks and steps are shown span by span."""

import gzip
import json

import pytest

from aorta.account.judge import ranks as shown
from aorta.errors import ReportError
from aorta.page.write import Outputs, write_report
from tests.account.reports_in_memory import records_of
from tests.records.run_folders import run_record, write_run


def traced_steps(folder, output, **asked):
    """By rank the steps of the Perfetto trace, and what was printed."""
    outputs = Outputs(page=False, parquet=False, **asked)
    text = write_report([folder], ["x"], output, outputs=outputs).text
    events = json.loads(gzip.decompress((output / "x.perfetto.json.gz").read_bytes()))["traceEvents"]
    steps = {}
    for event in events:
        if event["ph"] == "X" and event["name"].startswith("step "):
            steps.setdefault(event["pid"] // 1000 - 1, []).append(int(event["name"].split()[1]))
    return steps, text


@pytest.fixture
def folder(tmp_path):
    by_rank = records_of(num_steps=12, num_ranks=3, run_id="r")
    records = [line for lines in by_rank.values() for line in lines]
    write_run(tmp_path / "run", records, run_record(world_size=3))
    return tmp_path / "run"


def test_a_small_run_is_there_whole(tmp_path, folder):
    steps, text = traced_steps(folder, tmp_path / "out")
    assert steps == {rank: list(range(12)) for rank in range(3)}
    assert "--draw-ranks" not in text


def test_ranks_and_steps_that_were_asked_for(tmp_path, folder):
    steps, text = traced_steps(folder, tmp_path / "out", ranks={0, 2}, steps=(3, 5))
    assert steps == {0: [3, 4, 5], 2: [3, 4, 5]}
    assert "x.perfetto.json.gz holds 2 of 3 ranks and 3 of 12 steps" in text


def test_of_a_large_run_the_slowest_steps(tmp_path, folder, monkeypatch):
    monkeypatch.setattr(shown, "MOST_RECORDS", 12)
    monkeypatch.setattr(shown, "MAX_RANKS", 3)
    steps, text = traced_steps(folder, tmp_path / "out")
    assert {len(of_rank) for of_rank in steps.values()} == {4}
    assert "4 of 12 steps, the slowest ones" in text


@pytest.mark.parametrize("asked", [{"ranks": {7}}, {"steps": (90, 99)}])
def test_what_the_run_does_not_have_is_refused(tmp_path, folder, asked):
    with pytest.raises(ReportError, match="x has"):
        traced_steps(folder, tmp_path / "out", **asked)
    assert not (tmp_path / "out").exists()
