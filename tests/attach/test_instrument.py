"""The watchdog, the profiler's windows and the scalars in a loop that is not train.py's."""

import logging
from pathlib import Path

import pytest

import aorta
from aorta.errors import InstrumentError
from aorta.record.companions import Companion
from tests.attach import loops
from tests.dist.launch import run_ranks


def test_a_loop_has_its_windows_scalars_and_watchdog(tmp_path):
    for seen in run_ranks(loops.traced_loop, 2, str(tmp_path)):
        assert seen["lines"] == 12
        assert seen["traces"] == 2  # TensorBoard's and Perfetto's
        assert seen["profiled"] == [101, 102, 103, 104, 105]  # with those beside the window
        assert seen["why none"] is not None  # no GPU was traced
        assert seen["scalars"] == 1
        assert not seen["hang"]


def test_a_loop_that_hangs_is_reported_by_every_rank(tmp_path):
    assert run_ranks(loops.hanging_loop, 2, str(tmp_path)) == [[0, 1]] * 2


def test_the_scripts_own_error_comes_out(tmp_path):
    assert run_ranks(loops.raising_loop, 2, str(tmp_path)) == ["mine"] * 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hang": {"timeout": 5}}, r"hang: .*timeout.*fields of HangConfig"),
        ({"hang": {"timeout_s": -1}}, r"hang: .*timeout_s"),
        ({"hang": True}, r"hang: .*HangConfig"),
        ({"profiling": {"active": "often"}}, r"profiling: .*active.*fields of ProfilingConfig"),
        ({"profiling": 50}, r"profiling: .*ProfilingConfig"),
    ],
)
def test_an_option_that_is_none_is_named(tmp_path, options, message):
    with pytest.raises(InstrumentError, match=message):
        aorta.instrument(tmp_path, **options)


@pytest.mark.heavy
def test_a_companion_that_fails_is_left_out_and_training_goes_on(tmp_path: Path, caplog, monkeypatch):
    class Fails(Companion):
        begun = 0

        def step_begins(self, global_step):
            Fails.begun += 1
            raise OSError("planted")

    recorder = aorta.instrument(tmp_path)
    recorder.companions.add(Fails())
    with caplog.at_level(logging.ERROR), recorder:
        for _ in range(3):
            with recorder.step():
                pass
    assert Fails.begun == 1
    assert "Fails ends here, training goes on" in caplog.text
    assert len((tmp_path / "rank_0_metrics.jsonl").read_text().splitlines()) == 3
