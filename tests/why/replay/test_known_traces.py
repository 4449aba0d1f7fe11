"""Replay and path on real traces; skipped where they are not there."""

import pytest

from aorta.traces.kineto import read_kineto
from aorta.why.replay.changes import parse_changes
from aorta.why.replay.load import steps_of
from aorta.why.replay.path import critical_path
from aorta.why.replay.run import replay
from tests.larger_data import TRACES, needs_data

RUNS = {
    "h200_fsdp4": [f"h200_fsdp4_rank{rank}.json.gz" for rank in range(4)],
    "mi300x_resnet_ddp": ["mi300x_resnet_ddp_rank0of8_kineto.json.gz"],
    "mi350x_single": ["mi350x_single_nocomm_kineto.json"],
    "v100_dlrm": ["v100_dlrm_8ranks_kineto.tar.gz"],
}
pytestmark = needs_data(TRACES)


@pytest.fixture(scope="module", params=RUNS)
def steps(request):
    files = [TRACES / name for name in RUNS[request.param]]
    return steps_of(files if len(files) > 1 else files[0])


@pytest.mark.heavy
def test_replay_gives_every_step_of_every_rank_back_within_a_hundredth(steps):
    for step in steps:
        replayed = replay(step)
        for end in step.ends:
            assert abs(replayed.error(end.rank)) <= 0.01


@pytest.mark.heavy
def test_little_rests_on_what_nothing_explains(steps):
    without = parse_changes(["no unexplained delays"])
    for step in steps:
        replayed = replay(step, without)
        for end in step.ends:
            assert abs(replayed.error(end.rank)) <= 0.02


def test_parts_add_up_to_the_step(steps):
    for step in steps:
        replayed = replay(step)
        parts = critical_path(replayed)
        assert sum(part.ms for part in parts) == pytest.approx(replayed.slowest_ms, rel=1e-3)


@pytest.mark.heavy
def test_steps_are_those_of_the_reports():
    step = steps_of(TRACES / "h200_fsdp4_rank0.json.gz")[1]
    window = read_kineto(TRACES / "h200_fsdp4_rank0.json.gz").steps[1].window_ms
    assert step.measured_ms(0) == pytest.approx(window[1] - window[0], abs=1e-3)
