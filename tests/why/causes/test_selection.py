"""Causes of a large run are those of its last steps, whose number is bounded."""

import numpy as np
import pytest

from aorta.account.judge import judged as selection
from aorta.account.judge.judged import dataset, judge, looked_at
from aorta.account.load.open import load_run
from aorta.why.causes.text import title
from tests.why.causes.runs import STEPS, WIDTH, Host, causes, run_of

LAST = 10


def slow_loader_at_first(rank, step, noise):
    """Of the last steps none loses anything."""
    loader_ms = 9.0 if step < STEPS - LAST else 0.0
    return Host().work(loader_ms, "data").work(30.0 * noise.gauss(1, 0.01)).comm(2.0)


def slow_loader_at_last(rank, step, noise):
    loader_ms = 9.0 if step >= STEPS - LAST else 0.0
    return Host().work(loader_ms, "data").work(30.0 * noise.gauss(1, 0.01)).comm(2.0)


@pytest.fixture
def judged(tmp_path):
    return judge(load_run(run_of(tmp_path, slow_loader_at_last), "run"), 2)


def arrays_of(part):
    run = part
    yield from (run.metrics[name] for name in run.metrics)
    yield from (run.host_parts[name] for name in run.host_parts)
    yield from (run.start_unix_ns, run.num_collectives, run.host_bound)
    if run.arrivals is not None:
        yield from (run.arrivals.num_last, run.arrivals.num_judged, run.arrivals.caused_ms)


@pytest.mark.parametrize("most", [LAST * WIDTH, LAST * WIDTH + 1, 1])
def test_no_array_is_larger_than_the_bound_and_its_warmup(judged, monkeypatch, most):
    monkeypatch.setattr(selection, "MOST_NUMBERS", most)
    part = looked_at(judged)
    num_steps = max(most // WIDTH, 1)
    assert (part.num_judged, part.num_warmup) == (num_steps, 1)
    assert part.global_step.tolist() == list(range(STEPS - num_steps - 1, STEPS))
    assert {array.shape for array in arrays_of(part)} == {(WIDTH, num_steps + 1)}
    assert len(part.has_details) == len(part.has_collectives) == num_steps + 1
    for name in judged.metrics:
        assert np.array_equal(part.values(name), judged.values(name)[:, -num_steps:], equal_nan=True)


def test_a_run_within_the_bound_is_taken_whole(judged, monkeypatch):
    monkeypatch.setattr(selection, "MOST_NUMBERS", judged.num_judged * WIDTH)
    assert looked_at(judged) is judged


def test_what_the_last_steps_lack_is_no_cause(tmp_path, monkeypatch):
    run = load_run(run_of(tmp_path / "first", slow_loader_at_first), "run")
    assert causes(judge(run, 1))[0].kind == "data_loading"
    monkeypatch.setattr(selection, "MOST_NUMBERS", LAST * WIDTH)
    assert causes(judge(run, 1)) == []


def test_what_is_said_is_of_the_last_steps_and_says_so(judged, monkeypatch):
    monkeypatch.setattr(selection, "MOST_NUMBERS", LAST * WIDTH)
    first, *_ = causes(judged)
    assert first.kind == "data_loading"
    assert first.ms == pytest.approx(9.0, rel=0.05)
    assert f"mean of {LAST} of {judged.num_judged} judged steps" in title(dataset("run", [judged]))
