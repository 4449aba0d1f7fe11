import gzip
import json
import logging
from pathlib import Path

import pytest
import torch

from aorta.config.structs import ProfilingConfig
from aorta.record import profiler
from aorta.record.profiler import ProfilerWindow, why_nothing_is_traced


def run_steps(window: ProfilerWindow, num_steps: int, first: int = 0) -> None:
    for step in range(first, first + num_steps):
        with torch.profiler.record_function(f"global_step_{step}"):
            torch.ones(4).sum()
        window.step(step)


def names_in(path: Path) -> set[str]:
    content = path.read_bytes()
    if path.suffix == ".gz":
        content = gzip.decompress(content)
    return {event.get("name", "") for event in json.loads(content)["traceEvents"]}


def small(**changes: object) -> ProfilingConfig:
    defaults: dict[str, object] = {"enabled": True, "wait": 1, "warmup": 1, "active": 2, "repeat": 2}
    return ProfilingConfig(**(defaults | changes))  # type: ignore[arg-type]


def test_every_cycle_leaves_its_own_traces(tmp_path: Path) -> None:
    with ProfilerWindow(small(), tmp_path, rank=3) as window:
        run_steps(window, 10)

    folder = tmp_path / "torch_profiler" / "rank3"
    assert len(list(folder.glob("rank3.*.pt.trace.json"))) == 2
    for cycle, steps in ((0, {2, 3}), (1, {6, 7})):
        names = names_in(folder / f"trace_rank3_cycle{cycle}.json")
        assert {f"global_step_{step}" for step in steps} == {n for n in names if n.startswith("global_step")}
    assert window.active_steps == [2, 3, 6, 7]
    assert len(window.trace_files) == 4


def test_active_steps_are_global_after_a_resume(tmp_path: Path) -> None:
    with ProfilerWindow(small(repeat=1, tensorboard=False), tmp_path, rank=0) as window:
        run_steps(window, 6, first=100)
    assert window.active_steps == [102, 103]


def test_steps_that_hold_the_profilers_work_are_named(tmp_path: Path) -> None:
    """wait 3, warmup 1, active 2, twice. In the first step after a cycle ranks wait for each other's files,
    and after the last one before a cycle the profiler starts: of the wait, the middle is left out."""
    with ProfilerWindow(small(wait=3), tmp_path, rank=0) as window:
        run_steps(window, 13, first=100)
    assert window.active_steps == [104, 105, 110, 111]
    assert window.disturbed_steps == [102, 103, 104, 105, 106, 108, 109, 110, 111, 112]


@pytest.mark.parametrize("num_steps", range(1, 9))
@pytest.mark.parametrize("changes", [{"wait": 2}, {"wait": 0}, {"enabled": False}])
def test_too_few_steps_to_trace_one_are_known_before(
    tmp_path: Path, num_steps: int, changes: dict[str, object]
) -> None:
    settings = small(chrome_trace=False, **changes)
    with ProfilerWindow(settings, tmp_path, rank=0) as window:
        run_steps(window, num_steps)
    wanted = settings.enabled and not window.active_steps
    assert (why_nothing_is_traced(settings, num_steps) is not None) == wanted


def test_an_unfinished_cycle_is_exported(tmp_path: Path) -> None:
    with ProfilerWindow(small(), tmp_path, rank=0) as window:
        run_steps(window, 3)
    assert window.active_steps == [2]
    assert "global_step_2" in names_in(window.trace_files[0])


@pytest.mark.parametrize("changes", [{}, {"wait": 2}, {"wait": 9}])
def test_a_run_that_ends_before_an_active_step_leaves_no_trace_and_says_so_once(
    changes: dict[str, object], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """After two steps the first cycle would record (wait 1, warmup 1), warms up, or waits."""
    for rank in (0, 1):
        with ProfilerWindow(small(**changes), tmp_path, rank) as window:
            run_steps(window, 2)
        assert window.cycle_traces == []
    assert list(tmp_path.iterdir()) == []
    assert caplog.messages == ["profiling cycle 0 leaves no trace: it ended before its first active step"]


def test_a_later_cycle_without_an_active_step_leaves_no_trace(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with ProfilerWindow(small(chrome_trace=False), tmp_path, rank=0) as window:
        run_steps(window, 6)  # cycle 0 records 2 and 3; cycle 1 would begin to with 6
    assert len(window.trace_files) == 1
    assert "global_step_3" in names_in(window.trace_files[0])
    assert caplog.messages == ["profiling cycle 1 leaves no trace: it ended before its first active step"]


def test_the_trace_of_an_active_step_that_raised_is_kept(tmp_path: Path) -> None:
    window = ProfilerWindow(small(), tmp_path, rank=0)

    def fail_in_the_third_step() -> None:
        with window:
            run_steps(window, 2)
            with torch.profiler.record_function("global_step_2"):
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_in_the_third_step()
    assert "global_step_2" in names_in(window.trace_files[0])


def test_the_chrome_trace_can_be_packed(tmp_path: Path) -> None:
    settings = small(trace_filename="mine.json.gz", repeat=1)
    with ProfilerWindow(settings, tmp_path, rank=0) as window:
        run_steps(window, 4)
    packed = tmp_path / "torch_profiler" / "rank0" / "mine_rank0_cycle0.json.gz"
    assert "global_step_3" in names_in(packed)


def test_disabled_touches_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiler, "profile", None)
    with ProfilerWindow(small(enabled=False), tmp_path, rank=0) as window:
        run_steps(window, 3)
    assert window.active_steps == []
    assert list(tmp_path.iterdir()) == []


def test_a_trace_that_cannot_be_written_costs_one_warning_and_no_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "torch_profiler").write_text("in the way")
    with caplog.at_level(logging.WARNING), ProfilerWindow(small(repeat=1), tmp_path, rank=0) as window:
        run_steps(window, 8)
    assert len(caplog.records) == 1
    assert "trace of profiling cycle 0 is lost" in caplog.text
    assert window.trace_files == []


def test_a_write_that_kineto_swallows_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", lambda *_: None)
    with ProfilerWindow(small(repeat=1), tmp_path, rank=0) as window:
        run_steps(window, 8)
    assert "could not write" in caplog.text


@pytest.mark.parametrize("failing", ["start", "step", "stop"])
def test_a_profiler_that_fails_does_not_stop_the_run(
    failing: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object) -> None:
        raise RuntimeError("the device is held by another profiler")

    monkeypatch.setattr(torch.profiler.profile, failing, fail)
    with ProfilerWindow(small(repeat=1), tmp_path, rank=0) as window:
        run_steps(window, 2)
    assert caplog.messages == [
        "rank 0: profiling ends here, training goes on: the device is held by another profiler"
    ]


def test_sync_events_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, bool]] = []
    monkeypatch.setattr(
        torch._C._profiler, "_ExperimentalConfig", lambda **options: asked.append(options) or object()
    )
    assert profiler._experimental_config(small(sync_events=True)) is not None
    assert profiler._experimental_config(small()) is None
    assert asked == [{"enable_cuda_sync_events": True}]


def test_this_torch_records_sync_events(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with ProfilerWindow(small(sync_events=True, repeat=1), tmp_path, rank=0) as window:
        run_steps(window, 4)
    assert len(window.trace_files) == 2
    assert not caplog.records
