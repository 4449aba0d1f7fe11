"""Planted hangs on gloo ranks: who is named, how fast, and what is left of the records."""

import time
from pathlib import Path

import pytest

from aorta.config.structs import HangConfig
from aorta.hang.find import find, sentence
from aorta.hang.report import read_reports
from aorta.hang.watchdog import MOST_REMEMBERED_STEPS, Watchdog
from aorta.records.reader import read_steps
from tests.dist.launch import RankFailure, run_ranks
from tests.hang import stuck_ranks
from tests.hang.planted_hangs import HANGS_IN_STEP, slow_but_alive, steps_that_hang
from tests.limits import AT_ONCE_S

TIMEOUT_S = 2.0


@pytest.mark.parametrize(
    ("what", "kind"), [pytest.param("sleeps", "absent"), pytest.param("skips", "mismatch")]
)
def test_a_planted_hang_is_found_in_time_and_records_stay(what: str, kind: str, tmp_path: Path) -> None:
    with pytest.raises(RankFailure, match="exit code 124"):
        run_ranks(steps_that_hang, 2, str(tmp_path), what, TIMEOUT_S)
    reports = read_reports(tmp_path)
    assert [report.rank for report in reports] == [0, 1]
    found = find(reports)
    assert (found.kind, found.ranks) == (kind, [1])
    assert found.stuck is not None
    assert (found.stuck.seq, found.stuck.waiting[0].op) == (2 * HANGS_IN_STEP, "all_reduce")
    assert found.stuck.waiting[0].bytes == 64
    assert all(report.since_s < TIMEOUT_S + AT_ONCE_S for report in reports)
    assert "all_reduce" in sentence(found)
    for rank in range(2):
        steps = list(read_steps(tmp_path / f"rank_{rank}_metrics.jsonl"))
        assert [step.global_step for step in steps] == list(range(HANGS_IN_STEP))
        stacks = (tmp_path / "hang" / f"rank{rank}.stacks.txt").read_text()
        assert "steps_that_hang" in stacks


def test_a_rank_in_a_c_call_ends_itself_without_signals_and_without_a_store(tmp_path: Path) -> None:
    started_s = time.monotonic()
    with pytest.raises(RankFailure, match="exit code 124"):
        run_ranks(stuck_ranks.without_the_lock, 1, str(tmp_path))
    assert time.monotonic() - started_s < stuck_ranks.FOREVER_S
    (report,) = read_reports(tmp_path)
    assert (report.step, report.not_measured["device"]) == (3, "there is no device")
    assert report.main_thread[0].startswith("without_the_lock ")


def test_a_rank_that_keeps_the_interpreter_lock_is_ended_with_its_stacks(tmp_path: Path) -> None:
    with pytest.raises(RankFailure, match="exit code 1\\b"):
        run_ranks(stuck_ranks.with_the_lock, 1, str(tmp_path))
    assert "in with_the_lock" in (tmp_path / "stderr.txt").read_text()
    assert not (tmp_path / "hang").exists()


def test_a_watchdog_that_is_stuck_after_its_report_is_ended_too(tmp_path: Path) -> None:
    with pytest.raises(RankFailure, match="exit code 1\\b"):
        run_ranks(stuck_ranks.in_the_flight_recorder, 1, str(tmp_path))
    (report,) = read_reports(tmp_path)
    assert report.step == 3
    assert "in in_the_flight_recorder" in (tmp_path / "hang" / "rank0.stacks.txt").read_text()
    assert "hang: " in (tmp_path / "stderr.txt").read_text()


def test_a_main_thread_that_waits_in_the_store_does_not_stop_its_watchdog(tmp_path: Path) -> None:
    """Its own limit is far: it learns of the hang through the store alone."""
    with pytest.raises(RankFailure, match="exit code 124"):
        run_ranks(stuck_ranks.main_thread_in_the_store, 2, str(tmp_path))
    reports = read_reports(tmp_path)
    assert [report.rank for report in reports] == [0, 1]
    assert reports[1].reason == "another rank reports a hang"


def test_slow_steps_are_no_hang(tmp_path: Path) -> None:
    assert slow_but_alive(str(tmp_path), 1.2) == []
    assert not (tmp_path / "hang").exists()


def test_without_recorder_or_store_it_reports_once_and_goes_on(
    tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    with Watchdog(HangConfig(timeout_s=0.3), tmp_path, 0, 1) as watchdog:
        watchdog.beat(7)
        time.sleep(1.0)
    (report,) = read_reports(tmp_path)
    assert (report.step, report.groups) == (7, None)
    assert report.not_measured["groups"] == "collectives are not recorded"
    assert any("test_without_recorder" in frame for frame in report.main_thread)
    assert capfd.readouterr().err.count("hang: ") == 1


def test_an_earlier_runs_reports_are_moved_aside(tmp_path: Path) -> None:
    (tmp_path / "hang").mkdir()
    (tmp_path / "hang" / "rank0.json").write_text("old")
    with Watchdog(HangConfig(timeout_s=60), tmp_path, 0, 1):
        pass
    (moved,) = tmp_path.glob("previous-*/hang/rank0.json")
    assert moved.read_text() == "old"


def test_the_median_shortens_the_limit_once_it_is_known(tmp_path: Path) -> None:
    watchdog = Watchdog(HangConfig(timeout_s=300, median_factor=1000), tmp_path, 0, 1)
    assert watchdog.limit_s() == 300
    for step in range(12):
        watchdog.beat(step)
    assert watchdog.limit_s() == 10.0  # 1000 medians of microseconds, but never less


def test_disabled_it_starts_nothing(tmp_path: Path) -> None:
    with Watchdog(HangConfig(enabled=False, timeout_s=0.1), tmp_path, 0, 1) as watchdog:
        watchdog.beat(0)
        time.sleep(0.3)
    assert list(tmp_path.iterdir()) == []


def hang_config(**changes: float) -> HangConfig:
    return HangConfig(timeout_s=10.0, start_timeout_s=40.0, checkpoint_timeout_s=50.0, **changes)


def test_the_first_step_a_checkpoint_and_announced_pauses_have_limits_of_their_own(tmp_path: Path) -> None:
    watchdog = Watchdog(hang_config(pause_timeout_s=60.0), tmp_path, 0, 1)
    watchdog.beat(0)
    assert watchdog.limit_s() == 40.0
    watchdog.beat(1)
    assert watchdog.limit_s() == 10.0
    with watchdog.pausing("checkpoint"):
        assert watchdog.limit_s() == 50.0
        with watchdog.pausing("validation"):
            assert watchdog.limit_s() == 60.0
    assert watchdog.limit_s() == 10.0


def test_a_pause_does_not_count_as_a_step_nor_the_time_before_its_end(tmp_path: Path, monkeypatch) -> None:
    now_s = [100.0]
    monkeypatch.setattr("aorta.hang.watchdog.time.monotonic", lambda: now_s[0])
    watchdog = Watchdog(hang_config(), tmp_path, 0, 1)
    for step in range(3):
        now_s[0] += 1.0
        watchdog.beat(step)
    with watchdog.pausing("validation"):
        now_s[0] += 500.0
        assert watchdog._standstill(watchdog.limit_s()) is None
    now_s[0] += 1.0
    assert watchdog._standstill(watchdog.limit_s()) is None
    watchdog.beat(3)
    assert max(watchdog._durations_s) == 1.0


def test_time_in_which_the_process_did_not_run_is_no_standstill(tmp_path: Path, monkeypatch) -> None:
    now_s = [100.0]
    monkeypatch.setattr("aorta.hang.watchdog.time.monotonic", lambda: now_s[0])
    watchdog = Watchdog(hang_config(), tmp_path, 0, 1)
    for step in range(3):
        watchdog.beat(step)
    now_s[0] += 500.0  # stopped, and let go on
    watchdog._leave_out_stopped_time(499.0)
    assert watchdog._standstill(watchdog.limit_s()) is None
    now_s[0] += 12.0
    assert watchdog._standstill(watchdog.limit_s()) == "no step was begun for 13 s"


def test_a_debugger_session_is_a_pause(tmp_path: Path, monkeypatch) -> None:
    is_debugging = [True]
    monkeypatch.setattr("aorta.hang.watchdog.in_debugger", lambda: is_debugging[0])
    watchdog = Watchdog(hang_config(pause_timeout_s=60.0), tmp_path, 0, 1)
    for step in range(3):
        watchdog.beat(step)
    watchdog._look_for_debugger()
    assert watchdog.limit_s() == 60.0
    is_debugging[0] = False
    watchdog._look_for_debugger()
    assert watchdog.limit_s() == 10.0
    assert watchdog._standstill(10.0) is None


def test_steps_that_tell_the_usual_order_are_bounded(tmp_path: Path) -> None:
    watchdog = Watchdog(hang_config(), tmp_path, 0, 1)
    for step in range(1000):
        watchdog._remember(step, [])
    assert len(watchdog._finished_steps) == MOST_REMEMBERED_STEPS
