"""A recorder that is killed, left open, forked or started again."""

import json
import sys

import pytest

import aorta
from aorta.account.load.open import load_run
from aorta.cli.run import run_in
from aorta.records.reader import read_run, read_steps
from aorta.records.state import read_states
from tests.record.ended_runs import run


@pytest.mark.parametrize(
    ("ending", "kind", "num_steps"),
    [
        ("killed", "killed", 5),
        ("raises", "crashed", 5),
        ("left open", "finished", 6),
        ("forks", "finished", 6),
    ],
)
def test_every_closed_step_is_there_however_it_ended(tmp_path, ending, kind, num_steps):
    run(tmp_path, ending)
    loaded = load_run(tmp_path, "a")
    assert loaded.global_step.tolist() == list(range(num_steps))
    state = read_states(tmp_path)[0].process.ending
    assert (state.kind if state else "killed") == kind
    if kind != "finished":
        assert loaded.story[0].startswith(f"{kind} on rank 0 after step 4")
    else:
        assert loaded.story == []


def test_an_exception_after_recording_had_ended_is_how_the_rank_ended(tmp_path):
    """As in a script that fails behind its process group. What comes after that changes nothing."""
    with aorta.instrument(tmp_path) as recorder, recorder.step():
        pass
    assert read_states(tmp_path)[0].process.ending.kind == "finished"
    recorder.failed(KeyError("evaluation"))
    recorder.failed(ValueError("later"))
    ending = read_states(tmp_path)[0].process.ending
    assert (ending.kind, ending.why) == ("crashed", "KeyError: 'evaluation'")


def test_a_killed_run_that_is_started_again_is_one_run(tmp_path):
    run(tmp_path, "killed", AORTA_RUN_ID="one")
    run(tmp_path, "closed", 3, AORTA_RUN_ID="one")
    record = read_run(tmp_path)
    assert (record.run_id, [a.attempt for a in record.attempts]) == ("one", [0, 1])
    first, last = record.attempts
    assert (first.ending.kind, first.ending.ranks, first.first_step, first.last_steps) == (
        "killed",
        [0],
        0,
        [4],
    )
    assert (last.ending.kind, last.first_step, last.last_steps) == ("finished", 3, [5])
    assert [r.attempt for r in read_steps(tmp_path / "rank_0_metrics.jsonl", [])] == [0] * 5 + [1] * 3
    loaded = load_run(tmp_path, "a")
    assert loaded.global_step.tolist() == list(range(6))
    assert "steps 3 to 4 were done in attempt 0 and again in attempt 1: the last time counts" in loaded.notes


def test_a_run_without_a_name_goes_on_where_aorta_run_says_so(tmp_path, capsys):
    """Also behind an end that was no failure: the job's time was up."""
    assert run_in(tmp_path) is None
    assert "a new run begins" in capsys.readouterr().err
    run(tmp_path, "closed")
    run_id = run_in(tmp_path)
    run(tmp_path, "closed", 3, AORTA_CONTINUES=run_id)
    run(tmp_path, "closed", 5, AORTA_CONTINUES=run_in(tmp_path))
    record = read_run(tmp_path)
    assert (record.run_id, [a.first_step for a in record.attempts]) == (run_id, [0, 3, 5])
    assert load_run(tmp_path, "a").global_step.tolist() == [*range(6)]


@pytest.mark.heavy
def test_a_rollback_is_recorded_and_the_last_time_counts(tmp_path):
    with aorta.instrument(tmp_path) as recorder:
        for number, loss in [(0, 1.0), (1, 2.0), (2, 9.0), (1, 3.0), (2, 4.0)]:
            with recorder.step(global_step=number) as step:
                step.log(loss=loss)
    rows = list(read_steps(tmp_path / "rank_0_metrics.jsonl"))
    assert [(r.global_step, r.rollbacks, r.gap) for r in rows[3:]] == [
        (1, 1, "rolled back from step 2"),
        (2, 1, None),
    ]
    loaded = load_run(tmp_path, "a")
    assert [record.loss for record in loaded.records(0)] == [1.0, 3.0, 4.0]
    assert "steps 1 to 2 were done before it and again after a rollback: the last time counts" in loaded.notes


@pytest.mark.heavy
def test_a_pause_is_written_down(tmp_path):
    with aorta.instrument(tmp_path) as recorder:
        for number in range(6):
            if number == 2:
                recorder.pause()
            if number == 4:
                recorder.resume()
            with recorder.step():
                pass
    notes = load_run(tmp_path, "a").notes
    assert "steps are missing on purpose: the recorder was paused" in notes


@pytest.mark.heavy
def test_a_secret_in_the_command_stays_out_of_run_json(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", "--hf-token", "hf_abcdefghijklmnop"])
    with aorta.instrument(tmp_path, config={"hub": {"token": "abc"}}):
        pass
    text = (tmp_path / "run.json").read_text()
    assert "hf_abc" not in text
    assert json.loads(text)["config"] == {"hub": {"token": "<redacted>"}}
