"""A run whose file of lines outgrew its limit: the recorder makes it smaller, the report says so."""

import pytest
import torch

import aorta
from aorta.page.table import dataset_table
from aorta.page.write import make_report
from aorta.records import writer
from aorta.records.reader import read_steps
from aorta.records.rotation import LEFT_OUT, read_dropped

NUM_STEPS = 60
MOST_BYTES = 24_000


@pytest.fixture(scope="module")
def rotated_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rotated")
    weight = torch.ones(8, 8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "MOST_BYTES", MOST_BYTES)
        with aorta.instrument(folder, overhead="off") as recorder:
            for _ in range(NUM_STEPS):
                with recorder.step(tokens=3):
                    weight = weight @ weight / 8
    return folder


@pytest.mark.heavy
def test_the_file_of_a_run_stays_below_its_limit_and_the_sums_hold_every_step(rotated_run):
    path = rotated_run / "rank_0_metrics.jsonl"
    notes = []
    records = list(read_steps(path, notes))
    dropped = read_dropped(path)
    assert path.stat().st_size <= MOST_BYTES
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
