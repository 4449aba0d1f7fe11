"""A run whose file of lines outgrew max_mb: the recorder makes it smaller, the report says so."""

import pytest
import torch

import aorta
from aorta.config import Config
from aorta.errors import InstrumentError
from aorta.page.table import dataset_table
from aorta.page.write import make_report
from aorta.record import RecorderSettings
from aorta.records.reader import read_steps
from aorta.records.rotation import LEFT_OUT, read_dropped

NUM_STEPS = 60
MAX_MB = 0.03


@pytest.fixture(scope="module")
def rotated_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rotated")
    weight = torch.ones(8, 8)
    with aorta.instrument(folder, max_mb=MAX_MB, overhead="off") as recorder:
        for _ in range(NUM_STEPS):
            with recorder.step(tokens=3):
                weight = weight @ weight / 8
    return folder


@pytest.mark.heavy
def test_the_file_of_a_run_stays_below_max_mb_and_the_sums_hold_every_step(rotated_run):
    path = rotated_run / "rank_0_metrics.jsonl"
    notes = []
    records = list(read_steps(path, notes))
    dropped = read_dropped(path)
    assert path.stat().st_size <= MAX_MB * 2**20
    assert 0 < len(records) < NUM_STEPS
    assert dropped.num_steps + len(records) == NUM_STEPS
    assert dropped.sums["tokens"] == 3 * dropped.num_steps
    assert records[-1].global_step == NUM_STEPS - 1
    assert notes == []


def test_lists_that_went_have_a_reason(rotated_run):
    bare = [
        record
        for record in read_steps(rotated_run / "rank_0_metrics.jsonl", [])
        if record.collectives is None
    ]
    assert bare
    for record in bare:
        assert record.not_measured["collectives"] == LEFT_OUT
        assert record.not_measured["active_segments"] == LEFT_OUT


def test_the_report_reads_it_and_names_the_dropped_steps(rotated_run):
    dropped = read_dropped(rotated_run / "rank_0_metrics.jsonl")
    text = dataset_table(make_report([rotated_run], ["run"], warmup=0).datasets["run"])
    assert f"before step {dropped.num_steps} earlier lines were dropped" in text
    assert f"global steps 0 to {dropped.last_global_step}; their sums are kept" in text


def test_the_default_is_the_same_however_a_run_is_started():
    assert Config().recording.max_mb == RecorderSettings().max_mb
    assert RecorderSettings(max_mb=1).max_bytes == 2**20
    assert RecorderSettings(max_mb=None).max_bytes is None


@pytest.mark.parametrize("max_mb", [0, -1, True, "64", float("nan"), float("inf")])
def test_a_limit_that_is_none_is_named(max_mb):
    with pytest.raises(InstrumentError, match="max_mb must be a number above 0"):
        RecorderSettings(max_mb=max_mb)
