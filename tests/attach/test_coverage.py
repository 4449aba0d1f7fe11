"""Lines that `aorta run` prints of what is missing."""

import socket
from pathlib import Path
from types import SimpleNamespace

from aorta.attach.coverage import coverage_lines
from aorta.records.files import state_name
from aorta.records.launches import new_notes, note
from aorta.records.schema import AttemptRecord
from aorta.records.state import ProcessState, StateFile
from tests.records.plain_records import run, step
from tests.records.run_folders import write_run


def lines(tmp_path, **matched):
    (tmp_path / "rank_0_metrics.jsonl").write_bytes(b'{"global_step":0}\n')
    faults = ["times end early (mended in 13.1; from the release notes, not tried)"]
    coverage = {"kernel_records": {"matched": matched, "known_faults": faults}}
    run = SimpleNamespace(coverage=coverage, finished_unix_ns=1, overhead=None, run_id=None)
    return list(coverage_lines(run, tmp_path))


def test_a_run_whose_kernels_are_all_there_has_one_line(tmp_path):
    assert len(lines(tmp_path, num_no_time=0, num_lost=0)) == 1


def test_records_without_times_are_said_with_what_is_known_of_their_tracer(tmp_path):
    _, missing, fault = lines(tmp_path, num_no_time=7)
    assert missing == "aorta: 7 records of kernels came without times, and no step's numbers have them"
    assert fault.startswith("aorta: known of this CUPTI: times end early")


def test_kernel_records_that_were_asked_for_and_are_not_there_are_said(tmp_path: Path) -> None:
    (tmp_path / "rank_0_metrics.jsonl").write_bytes(b'{"global_step":0}\n')
    coverage = {"kernel_records": {"reason": "HIP has initialised"}}
    record = SimpleNamespace(coverage=coverage, finished_unix_ns=1, overhead=None, run_id=None)
    said = "aorta: --kernels on: events timed the steps: HIP has initialised"
    assert list(coverage_lines(record, tmp_path, kernels_asked=True))[1:] == [said]
    assert list(coverage_lines(record, tmp_path))[1:] == []


def test_steps_that_the_overhead_left_out_are_not_called_recorded(tmp_path: Path) -> None:
    some = [step(number, run_id="a", is_recorded=number < 2) for number in range(5)]
    write_run(tmp_path, some, run(run_id="a"))
    first, *_ = coverage_lines(run(run_id="a"), tmp_path)
    assert first.startswith("aorta: rank 0: 5 steps, 2 of them recorded (--overhead)")
    write_run(tmp_path / "all", [step(0, run_id="a")], run(run_id="a"))
    first, *_ = coverage_lines(run(run_id="a"), tmp_path / "all")
    assert first.startswith("aorta: rank 0: 1 step recorded")


def test_what_a_backend_does_not_count_is_no_collective(tmp_path: Path) -> None:
    """NCCL's count is of collectives alone, gloo's of send and recv too."""
    for seen, backend, said in (
        ({"send": 144, "recv": 144}, 0, "288 send/recv seen, 0"),
        ({"send": 6, "all_reduce": 4}, 4, "4 of 4 collectives and 6 send/recv seen, 0"),
        ({"send": 6, "all_reduce": 4}, 10, "10 of 10 collectives and send/recv seen, 0"),
        ({"all_reduce": 4}, 5, "4 of 5 collectives seen, 0"),
    ):
        groups = {"default": {"backend": backend, "seen": sum(seen.values())}}
        record = run(run_id="a", coverage={"seen": seen, "groups": groups})
        write_run(tmp_path / said[:2] / str(backend), [step(0, run_id="a")], record)
        first, *_ = coverage_lines(record, tmp_path / said[:2] / str(backend))
        assert first == f"aorta: rank 0: 1 step recorded; {said} of them outside of steps"


def test_how_the_command_ended_is_said(tmp_path: Path) -> None:
    attempt = AttemptRecord(attempt=0, world_size=1, started_unix_ns=1)
    record = run(run_id="a", attempts=[attempt])
    write_run(tmp_path, [step(0, run_id="a")], record)
    state = ProcessState(
        run_id="a", attempt=0, rank=0, world_size=1, host=socket.gethostname(), pid=2**22 + 1,
        process_start=0.0, started_unix_ns=1, written_unix_ns=1,
    )  # fmt: skip
    StateFile(tmp_path / state_name(0), 0).write(state)
    note(new_notes(tmp_path), "end", code=-11, pid=2**22 + 1)
    assert "aorta: killed on rank 0: SIGSEGV: a fault in native code" in list(
        coverage_lines(record, tmp_path)
    )
