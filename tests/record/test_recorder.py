"""The instrument on two real gloo ranks."""

import contextlib
import json
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import aorta
from aorta.account.load.open import load_run
from aorta.errors import InstrumentError, RecordError
from aorta.record import Recorder, overhead
from aorta.records.reader import read_run
from aorta.records.state import read_states
from tests.dist.launch import RankFailure, run_ranks
from tests.limits import LIMIT_S
from tests.record import rank_programs


@pytest.fixture(scope="module")
def paths_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("paths")


@pytest.fixture(scope="module")
def seen(paths_folder: Path) -> dict[str, list[str]]:
    both = run_ranks(rank_programs.operations_by_path, 2, str(paths_folder))
    assert both[0] == both[1]
    return both[0]


def test_as_many_are_seen_as_the_backends_counted(seen, paths_folder):
    """gloo's monitored barrier is one call of the program's and several numbers of the backend's."""
    groups = read_run(paths_folder).coverage["groups"]
    assert {name: group["backend"] for name, group in groups.items()} == {
        name: group["seen"] for name, group in groups.items()
    }


@pytest.mark.parametrize(
    ("path", "operations"),
    [
        ("sync", ["all_reduce"]),
        ("async", ["all_reduce"]),
        ("functional", ["all_reduce"]),
        ("compiled", ["all_reduce"]),
        ("compiled_in_place", ["all_reduce", "all_reduce"]),
        ("object", ["all_gather", "all_gather"]),  # sizes, then contents
        ("coalesced", ["all_reduce"]),
        ("batched_p2p", ["send", "recv"]),  # gloo does not coalesce them
        ("all_to_all", ["all_to_all"]),
        ("inference", ["all_reduce"]),
        ("barrier", ["barrier"]),
        ("monitored_barrier", ["barrier"]),
    ],
)
def test_every_path_is_recorded_once(seen, path, operations):
    assert seen[path] == operations


def test_reducer_in_cpp_is_recorded(seen):
    assert "all_reduce" in seen["ddp"]


def test_fsdp_is_recorded(seen):
    assert seen["fsdp"].count("all_gather") == 1  # one group of parameters, kept for backward at the root
    assert seen["fsdp"].count("reduce_scatter") == 1


def test_dtensor_is_recorded(seen):
    assert "all_gather" in seen["dtensor"]


def test_removing_the_instrument_restores_everything(tmp_path):
    assert run_ranks(rank_programs.everything_is_restored, 2, str(tmp_path)) == [[], []]


def test_dispatch_modes_and_profilers_see_what_they_see_without_it(tmp_path):
    for by_listener in run_ranks(rank_programs.everybody_still_listens, 2, str(tmp_path)):
        for without, recorded in by_listener.values():
            assert recorded == without
            assert any("reduce" in name for name in without)


def test_tensors_of_every_kind_are_recorded_once(tmp_path):
    for seen in run_ranks(rank_programs.other_tensors, 2, str(tmp_path)):
        assert set(map(tuple, seen.values())) == {("all_reduce",)}


def test_no_launch_holds_the_interpreter_lock(tmp_path):
    """A gloo thread that drops a work holds gloo's queue and may need the lock: both would stop for good."""
    try:
        both = run_ranks(rank_programs.launches_while_the_queue_is_held, 2, str(tmp_path))
    except RankFailure as failure:
        at = [path.read_text() for path in sorted(tmp_path.glob("launch_*"))]
        pytest.fail(f"stopped at {at}: {failure}")
    for recorded in both:
        assert len(recorded) > 20
        assert min(recorded) >= 1  # and each is seen


def test_works_behave_as_without_the_instrument(tmp_path):
    for answers in run_ranks(rank_programs.works_behave, 2, str(tmp_path)):
        assert answers == {
            "waits twice": True,
            "completed": True,
            "result": 2.0,
            "future": 2.0,
            "waits after the recorder has closed": True,
        }


def test_works_that_nobody_waits_for_are_let_go(tmp_path):
    for kept, answer in run_ranks(rank_programs.works_that_nobody_waits_for, 2, str(tmp_path)):
        assert kept < 300
        assert answer == 2


def test_many_steps_leave_nothing_behind(tmp_path):
    for held in run_ranks(rank_programs.what_many_steps_leave, 2, str(tmp_path)):
        for name, (early, late) in held.items():
            assert late <= early + 4, name  # what is under way at the moment, and not one more per step


@pytest.fixture(scope="module")
def through_futures(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Any]]]:
    return run_ranks(rank_programs.waits_through_futures, 2, str(tmp_path_factory.mktemp("futures")))


@pytest.mark.parametrize(
    "way", ["wait", "then", "collect_all", "wait_all", "wait_tensor", "async tensor", "autograd"]
)
def test_waiting_for_a_future_is_waiting_for_its_collective(through_futures, way):
    waiting, late = through_futures
    assert waiting[way]["exposed_ms"] > 150
    assert waiting[way]["hidden_ms"] < 100
    assert late[way]["compute_ms"] > 150


@pytest.mark.parametrize("way", ["polled", "handed over"])
def test_a_wait_that_nobody_can_see_leaves_no_numbers(through_futures, way):
    for overlaps in through_futures:
        assert overlaps[way].get("hidden_ms") is None  # a line has no key for what was not measured
        assert overlaps[way].get("exposed_ms") is None  # a line has no key for what was not measured
        assert overlaps[way].get("compute_ms") is None  # a line has no key for what was not measured
        assert "future" in overlaps[way]["reason"]


def test_futures_that_ddp_waits_for_are_accounted_for(tmp_path):
    assert run_ranks(rank_programs.futures_in_ddp, 2, str(tmp_path)) == [[None] * 3] * 2


def test_the_last_step_has_its_overlap(tmp_path):
    assert run_ranks(rank_programs.last_step_of_ddp, 2, str(tmp_path)) == [[None] * 10] * 2


def test_waiting_for_a_late_rank_is_exposed_communication(tmp_path):
    waiting, late = run_ranks(rank_programs.a_stall_is_seen, 2, str(tmp_path))
    assert waiting[1]["exposed_ms"] > 150
    assert late[1]["exposed_ms"] < 100
    assert late[1]["compute_ms"] > 150


def test_work_beside_an_asynchronous_collective_hides_it(tmp_path):
    hiding, _ = run_ranks(rank_programs.overlap_is_seen, 2, str(tmp_path))
    assert hiding["hidden_ms"] > 150
    assert hiding["exposed_ms"] < 50


def test_nothing_is_seen_while_the_recorder_pauses_and_time_goes_on(tmp_path):
    for rank in run_ranks(rank_programs.paused_for_a_while, 2, str(tmp_path)):
        assert rank["off"]
        assert rank["steps"] == [0, 3]
        assert rank["collectives"] == [1, 1]
        assert 0 < rank["first_ms"] <= rank["before_pause_ms"]  # its window ends where the pause begins
        assert rank["apart_s"] > 0.3


def test_a_killed_rank_leaves_its_own_and_the_others_records(tmp_path):
    with pytest.raises(RankFailure):
        run_ranks(rank_programs.killed_in_the_middle, 2, str(tmp_path))
    assert [line["global_step"] for line in rank_programs.records(str(tmp_path), 1)] == [0, 1, 2, 3, 4]
    survivor = [line["global_step"] for line in rank_programs.records(str(tmp_path), 0)]
    assert survivor[:6] == [0, 1, 2, 3, 4, 5]


def test_finished_steps_are_written_while_the_main_thread_is_blocked(tmp_path):
    assert run_ranks(rank_programs.blocked_main_thread, 2, str(tmp_path))[1] == 3


def test_a_full_disk_stops_recording_and_not_training(tmp_path):
    assert run_ranks(rank_programs.full_disk, 2, str(tmp_path)) == [20, 20]


def test_training_is_bit_identical_with_and_without(tmp_path):
    forms = {
        "ddp": {"parallel": {"mode": "ddp"}, "model": {}},
        "fsdp": {"parallel": {"mode": "fsdp"}, "model": {}},
        "tp": {"parallel": {"mode": "fsdp", "tp": 2}, "model": {}},
        "moe": {"parallel": {"mode": "fsdp", "ep": 2}, "model": {"num_experts": 4}},
    }
    for of_rank in run_ranks(rank_programs.train_digests, 2, str(tmp_path), forms):
        assert {name: without for name, (without, _) in of_rank.items()} == {
            name: recorded for name, (_, recorded) in of_rank.items()
        }
        assert {len(digest) for digest, _ in of_rank.values()} == {64}
    assert len([*tmp_path.glob("*/rank_*_metrics.jsonl")]) == 2 * len(forms)


# -- one process, no group ------------------------------------------------------------------------


def test_a_script_without_a_process_group_is_recorded(tmp_path):
    with aorta.instrument(tmp_path) as recorder:
        for number in range(3):
            with recorder.step(tokens=10) as step:
                step.log(loss=torch.tensor(float(number)), lr=0.5)
    lines = rank_programs.records(str(tmp_path), 0)
    assert [line["loss"] for line in lines] == [0, 1, 2]
    assert lines[0]["source"] == "host"
    assert lines[0]["overlap"].get("overlap_ratio") is None  # absent: not measured
    assert lines[0]["tokens"] == 10
    run = json.loads((tmp_path / "run.json").read_text())
    assert run["finished_unix_ns"] > run["started_unix_ns"]
    assert len(run["clock_anchors"]) == 3


def test_a_line_tells_what_the_thread_had_of_the_cores(tmp_path):
    with aorta.instrument(tmp_path) as recorder:
        for _ in range(3):
            with recorder.step():
                end_ns = time.thread_time_ns() + 5_000_000
                while time.thread_time_ns() < end_ns:
                    pass
            time.sleep(0.02)  # of the window, and of no core
    *lines, last = rank_programs.records(str(tmp_path), 0)
    for line in lines:
        cpu_ms, ready_ms, process_ms, faults, system_ms = line["host_use"]
        assert 5.0 <= cpu_ms < line["step_ms"] - 15.0
        assert cpu_ms <= process_ms + 1.0
        assert ready_ms is None or ready_ms >= 0.0
        assert faults is None or faults >= 0
        assert system_ms is None or 0.0 <= system_ms <= line["step_ms"]
    assert "host_use" not in last  # its window ends where nobody reads


def test_what_a_token_costs_is_in_run_json_and_makes_a_rate_of_the_report(tmp_path):
    """10 tokens of 10^9 FLOP in each step; a CPU has no peak, and it is said."""
    with aorta.instrument(tmp_path, flops_per_token=1e9, precision="fp32") as recorder:
        for _ in range(4):
            with recorder.step(tokens=10):
                time.sleep(0.002)
    run = json.loads((tmp_path / "run.json").read_text())
    assert run["flops_per_token"] == 1e9
    found = load_run(tmp_path, "a")
    rate = found.metrics["tokens_per_s"][0]
    assert rate == pytest.approx(1e4 / found.metrics["step_ms"][0])
    assert found.metrics["model_tflops_per_gpu"][0] == pytest.approx(rate / 1e3)
    if run["peak_flops"] is None:
        assert "GPU" in run["not_measured"]["peak_flops"]
        assert found.not_measured["mfu"] == run["not_measured"]["peak_flops"]


@pytest.mark.parametrize("wrong", [0, -1.0, float("nan"), True, "7e9"])
def test_flops_of_a_token_are_a_number_above_zero(tmp_path, wrong):
    with pytest.raises(InstrumentError, match="flops_per_token must be a number above 0"):
        aorta.instrument(tmp_path, flops_per_token=wrong)


@pytest.mark.heavy
def test_steps_are_flushed_when_the_body_raises_and_that_one_is_none(tmp_path):
    """A step that raised has no time of a step."""

    def fail(recorder: Recorder) -> None:
        with recorder.step():
            pass
        with recorder.step():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), aorta.instrument(tmp_path) as recorder:
        fail(recorder)
    assert [line["global_step"] for line in rank_programs.records(str(tmp_path), 0)] == [0]


def test_leaving_with_is_closing(tmp_path, monkeypatch):
    """Programs put something of theirs around `close`. An error being handled outside is none of its own."""
    seen, close = [], Recorder.close

    def noted(recorder: Recorder, *args: Any, **named: Any) -> None:
        seen.append(dict(recorder.journal.num_seen))
        close(recorder, *args, **named)

    monkeypatch.setattr(Recorder, "close", noted)
    try:
        raise ValueError("of before")
    except ValueError:
        with aorta.instrument(tmp_path) as recorder, recorder.step():
            pass
    assert seen == [{}]
    ending = read_states(tmp_path)[0].process.ending
    assert ending is not None
    assert ending.kind == "finished"


@pytest.mark.heavy
def test_a_step_that_raised_is_left_out_and_the_next_is_recorded(tmp_path):
    with aorta.instrument(tmp_path) as recorder:
        for number in range(3):
            with contextlib.suppress(ZeroDivisionError), recorder.step():
                1 / (number - 1)
    assert [line["global_step"] for line in rank_programs.records(str(tmp_path), 0)] == [0, 2]


@pytest.mark.heavy
def test_steps_within_a_pause_leave_no_lines(tmp_path):
    with aorta.instrument(tmp_path) as recorder:
        for number in range(6):
            if number == 2:
                recorder.pause()
            if number == 4:
                recorder.resume()
            with recorder.step() as step:
                step.log(loss=float(number))
    assert [line["loss"] for line in rank_programs.records(str(tmp_path), 0)] == [0, 1, 4, 5]


@pytest.mark.heavy
def test_a_recorder_is_for_one_run(tmp_path):
    recorder = aorta.instrument(tmp_path)
    with recorder, recorder.step():
        pass
    with pytest.raises(InstrumentError, match="a recorder is for one run"):
        recorder.__enter__()
    assert len(rank_programs.records(str(tmp_path), 0)) == 1  # still in its place


@pytest.mark.heavy
def test_a_loss_that_is_no_number_is_null_with_the_reason(tmp_path):
    with aorta.instrument(tmp_path) as recorder, recorder.step() as step:
        step.log(loss=torch.tensor(float("nan")), lr=float("inf"))
    (line,) = rank_programs.records(str(tmp_path), 0)
    assert (line["loss"], line["lr"]) == (None, None)
    reasons = line["not_measured"]
    assert (reasons["loss"], reasons["lr"], reasons["grad_norm"]) == (
        "not finite: nan",
        "not finite: inf",
        "not logged",
    )


@pytest.mark.heavy
def test_any_scalar_is_logged_by_its_name(tmp_path):
    with aorta.instrument(tmp_path) as recorder, recorder.step() as step:
        step.log(loss=1.0, my_lr=2, entropy=torch.tensor(0.5), broken=float("inf"), absent=None)
    (line,) = rank_programs.records(str(tmp_path), 0)
    assert line["scalars"] == {"my_lr": 2.0, "entropy": 0.5}
    assert line["not_measured"]["scalars.broken"] == "not finite: inf"


def test_a_rank_may_be_late_with_the_end_of_the_run_before(tmp_path):
    """Two recorders, one folder: the second waits until every rank has closed the first."""
    assert run_ranks(rank_programs.two_runs_one_late_rank, 2, str(tmp_path)) == [2, 2]
    (aside,) = tmp_path.glob("previous-*")
    assert [len(rank_programs.records(str(aside), rank)) for rank in (0, 1)] == [1, 1]


def test_the_folder_of_a_run_that_goes_on_is_left_alone(tmp_path, monkeypatch):
    """Another process records there; this one is told so, and nothing is moved."""
    monkeypatch.setattr("aorta.record.run_folder.LEAVING_S", 0.3)
    script = (
        "import sys, aorta\n"
        "with aorta.instrument(sys.argv[1]) as recorder:\n"
        "    with recorder.step(): pass\n"
        "    print('on', flush=True); sys.stdin.readline()\n"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert other.stdin is not None
    assert other.stdout is not None
    try:
        assert other.stdout.readline() == b"on\n"
        with pytest.raises(RecordError, match=r"a run is still writing .*: end it, or choose another"):
            aorta.instrument(tmp_path).__enter__()
        assert not list(tmp_path.glob("previous-*"))
    finally:
        other.communicate(b"\n", timeout=LIMIT_S)
    with aorta.instrument(tmp_path) as recorder, recorder.step():
        pass
    assert len(list(tmp_path.glob("previous-*"))) == 1


def test_all_ranks_hear_that_the_folder_cannot_be_cleared(tmp_path):
    for message in run_ranks(rank_programs.a_folder_that_cannot_be_cleared, 2, str(tmp_path)):
        assert message == "planted on rank 0"


@pytest.mark.heavy
def test_a_second_run_moves_the_first_aside(tmp_path):
    for _ in range(2):
        with aorta.instrument(tmp_path) as recorder, recorder.step():
            pass
    (aside,) = tmp_path.glob("previous-*")
    # A run as short as this may end before the first stack is sampled.
    assert {path.name for path in aside.iterdir()} - {"rank_0_stacks.jsonl"} == {
        "run.json",
        "node_0_digest.bin",
        "rank_0_metrics.jsonl",
        "rank_0_state.jsonl",
    }
    assert len(rank_programs.records(str(tmp_path), 0)) == 1


@pytest.mark.heavy
def test_details_are_left_out_with_a_reason_but_not_of_slow_steps(tmp_path, monkeypatch):
    monkeypatch.setattr(overhead, "DETAILED", ((8, 1),))
    with aorta.instrument(tmp_path, overhead="off") as recorder:
        for number in range(40):
            with recorder.step():
                time.sleep(0.2 if number == 30 else 0.001)
    lines = rank_programs.records(str(tmp_path), 0)
    detailed = {line["global_step"] for line in lines if "collectives" in line}
    assert detailed >= {*range(8), 30}
    assert len(detailed) < 30
    brief = next(line for line in lines if "collectives" not in line)
    assert "kept in some steps" in brief["not_measured"]["collectives"]
    assert brief["overlap"]["comm_ms"] == 0


@pytest.mark.heavy
def test_callbacks_get_every_record_and_cannot_break_the_run(tmp_path: Path):
    got: list[int] = []
    with aorta.instrument(tmp_path) as recorder:
        recorder.on_record(lambda record: got.append(record.global_step))
        recorder.on_record(lambda record: 1 / 0)  # type: ignore[func-returns-value, arg-type, return-value]
        for _ in range(3):
            with recorder.step():
                pass
    assert got == [0, 1, 2]


def test_a_recorder_that_could_not_start_leaves_nothing_installed(tmp_path):
    with pytest.raises(InstrumentError, match="model cannot be written as JSON"):
        aorta.instrument(tmp_path / "a", model={"class": object()}).__enter__()
    with aorta.instrument(tmp_path / "a", model={"h": 8}) as recorder, recorder.step():
        pass


@pytest.mark.heavy
def test_a_fault_while_starting_takes_the_instrument_off_again(tmp_path, monkeypatch):
    with monkeypatch.context() as planted:
        planted.setattr("aorta.record.description.collect_versions", lambda: _raise(OSError("planted")))
        with pytest.raises(OSError, match="planted"):
            aorta.instrument(tmp_path / "a").__enter__()
    with aorta.instrument(tmp_path / "b") as recorder, recorder.step():
        pass


def _raise(error):
    raise error


@pytest.mark.heavy
@pytest.mark.parametrize("tokens", [1.5, "x", -1, torch.tensor(7)])
def test_tokens_are_a_number_that_the_host_knows(tmp_path, tokens):
    with (
        aorta.instrument(tmp_path) as recorder,
        pytest.raises(InstrumentError, match="tokens must be an int"),
    ):
        recorder.step(tokens=tokens)


@pytest.mark.parametrize(
    ("misuse", "message"),
    [
        (lambda folder: aorta.instrument(folder, placement="sideways"), "placement must be"),
        (lambda folder: aorta.instrument(folder, overhead=0), "overhead must be"),
        (lambda folder: aorta.instrument(folder, overhead="1 percent"), "overhead must be"),
        (lambda folder: aorta.instrument(folder, telemetry_interval_s=0), "telemetry_interval_s must be"),
        (lambda folder: aorta.instrument(folder, device="foo"), "device must be one of torch's"),
        (lambda folder: aorta.instrument(folder).step(), "outside of 'with"),
    ],
)
def test_misuse_is_named(tmp_path, misuse, message):
    with pytest.raises(InstrumentError, match=message):
        misuse(tmp_path)


def test_a_resume_does_not_show_warnings_again(tmp_path):
    with aorta.instrument(tmp_path) as recorder, warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")  # each once per place
        for _ in range(2):
            warnings.warn("an old name", DeprecationWarning, stacklevel=1)
            recorder.pause()
            recorder.resume()
    assert [str(warning.message) for warning in shown] == ["an old name"]


@pytest.mark.heavy
def test_a_pause_within_a_step_is_refused(tmp_path):
    with (
        aorta.instrument(tmp_path) as recorder,
        recorder.step(),
        pytest.raises(InstrumentError, match=r"recorder\.pause inside"),
    ):
        recorder.pause()


@pytest.mark.heavy
def test_two_recorders_at_once_are_refused(tmp_path):
    with (
        aorta.instrument(tmp_path / "a"),
        pytest.raises(InstrumentError, match="instrumented already"),
        aorta.instrument(tmp_path / "b"),
    ):
        pass


@pytest.mark.heavy
def test_a_step_within_a_step_is_refused(tmp_path):
    with (
        aorta.instrument(tmp_path) as recorder,
        recorder.step(),
        pytest.raises(InstrumentError, match="inside"),
    ):
        recorder.step().__enter__()


def test_nothing_is_kept_after_the_sending_thread_gave_up(tmp_path, caplog, monkeypatch):
    """A fault of the instrument ends recording; the run goes on and its memory does not grow."""

    def fails(*_):
        raise RuntimeError("planted")

    monkeypatch.setattr("aorta.record.sending.Extractor.extract", fails)
    with aorta.instrument(tmp_path) as recorder:
        for _ in range(3):
            with recorder.step():
                pass
        deadline = time.monotonic() + LIMIT_S
        while not recorder.journal.stopped and time.monotonic() < deadline:
            time.sleep(0.01)
        assert recorder.journal.stopped
        for _ in range(50):
            with recorder.step() as step:
                step.log(loss=1.0)
        assert not recorder.journal.closed
    assert "recording stopped" in caplog.text
