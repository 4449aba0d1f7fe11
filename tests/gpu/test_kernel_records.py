"""Kernel records on a real GPU: beside profilers, and where they cannot be had. No GPU: tests/steps and
tests/device have the same behaviour on made records and a stand-in for the driver."""

import json
import os
import subprocess
import sys

import pytest

from tests.limits import LIMIT_S

pytestmark = [pytest.mark.gpu(1), pytest.mark.timeout(300)]

PER_STEP = 10
NO_COMPILER = {"CC": "no-such-compiler", "AORTA_CACHE_DIR": "/tmp/aorta-without-compiler"}


def run(name: str, **environment: str) -> dict:
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.kernel_programs", name],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env=os.environ | environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    return result | {"said": done.stdout + done.stderr}


def test_every_step_has_its_kernels():
    result = run("plain")

    assert result["sources"] == ["kernels"] * 12
    assert result["num_kernels"] == [PER_STEP] * 12
    assert result["reason"] is None


def test_one_step_of_four_has_its_kernels_and_the_others_their_time():
    result = run("sampled")

    assert result["sources"] == ["kernels"] * 12
    assert result["num_kernels"][::4] == [PER_STEP] * 3


def test_events_serve_where_they_are_asked_for():
    assert run("events")["sources"] == ["events"] * 12


@pytest.mark.parametrize("program", ["profiled_inside", "profiled_by_schedule"])
def test_a_profiler_gets_its_kernels_and_no_step_outside_its_windows_is_lost(program):
    result = run(program)

    assert all(traced >= 2 * PER_STEP for traced in result["traced"])
    by_source = dict(zip(range(12), result["sources"], strict=True))
    in_windows = {4, 5, 6} if program == "profiled_inside" else {2, 3, 4, 7, 8, 9}
    for step, source in by_source.items():
        if step not in in_windows:
            assert (step, source, result["num_kernels"][step]) == (step, "kernels", PER_STEP)
    assert "unknown buffer" not in result["said"]
    assert "ERROR" not in result["said"]


def test_a_profiler_around_everything_keeps_its_kernels():
    result = run("profiled_around")

    assert result["sources"] == ["events"] * 12
    assert result["traced"][0] >= 12 * PER_STEP
    assert "torch.profiler" in result["reason"]


def test_profilers_before_and_after_are_not_disturbed():
    result = run("profiled_before_and_after")

    assert result["sources"] == ["kernels"] * 12
    before, after = result["traced"]
    assert before == after >= 10
    assert "unknown buffer" not in result["said"]


@pytest.mark.parametrize(
    ("program", "environment", "reason"),
    [
        pytest.param("tried", NO_COMPILER, "no C compiler", id="no-compiler"),
        pytest.param("tried", {"AORTA_CACHE_DIR": "/proc/none"}, None, id="cache-unwritable"),
        pytest.param("wrong_version", {}, "version", id="wrong-version"),
        pytest.param("failing_test", {}, "self-test", id="self-test-fails"),
    ],
)  # fmt: skip
def test_training_goes_on_whatever_fails_and_the_run_says_why(program, environment, reason):
    result = run(program, **environment)

    if reason is None:  # built in a temporary folder
        assert result["sources"] == ["kernels"] * 12
    else:
        assert reason in result["reason"]
        assert result["sources"] == ["events"] * 12


def test_a_full_ring_is_a_reason_and_no_gap_in_the_numbers():
    result = run("full_ring")

    for kernels, why in zip(result["num_kernels"], result["why_not"], strict=True):
        assert kernels == PER_STEP or "full" in why or "no records" in why
    assert any(why is not None for why in result["why_not"])
