"""A run's records beside a trace of its kernels; the trace is written by hand."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from aorta.account.load.open import load_run
from aorta.merge.windows import check_run
from aorta.records.files import steps_name
from aorta.records.reader import read_run, read_steps
from aorta.records.writer import write_json
from tests.merge.traced_runs import ROUNDED_MS, write_records, write_trace
from tests.records.run_folders import sealed_again


def test_a_window_goes_into_run_json(tmp_path):
    write_records(tmp_path, 4)
    trace = write_trace(tmp_path / "torch_profiler/rank0/trace.json", 4)
    (check,) = check_run(tmp_path, 0, [trace])
    assert check.steps == [0, 1, 2]  # the last step's kernels may not all be there
    assert (check.num_matched, check.leftovers) == (3, [])
    run = read_run(tmp_path / "run.json")
    assert run.coverage["kernel_windows"] == [msgspec.to_builtins(check)]


def test_the_kernels_of_the_window_become_lines_of_their_own(tmp_path):
    write_records(tmp_path, 4)
    trace = write_trace(tmp_path / "torch_profiler/rank0/trace.json", 4)
    check_run(tmp_path, 0, [trace])
    records = list(read_steps(tmp_path / steps_name(0)))
    assert [(r.global_step, r.source) for r in records] == [(step, "events") for step in range(4)] + [
        (step, "kineto") for step in range(3)
    ]
    for own, line in zip(records, records[4:], strict=False):
        numbers = line.overlap
        # Kernels compute 0-4 and 6-10 and communicate 2.4-6.
        assert numbers.compute_ms == pytest.approx(8.0, abs=ROUNDED_MS)
        assert numbers.comm_ms == pytest.approx(3.6, abs=ROUNDED_MS)
        assert numbers.hidden_ms == pytest.approx(1.6, abs=ROUNDED_MS)
        assert numbers.exposed_ms == pytest.approx(2.0, abs=ROUNDED_MS)
        assert numbers.idle_ms == pytest.approx(0.0, abs=ROUNDED_MS)
        assert (line.start_unix_ns, line.step_ms) == (own.start_unix_ns, own.step_ms)
        assert own.collectives is not None
        assert line.collectives is not None
        (mine,), (kernel,) = own.collectives, line.collectives
        assert (kernel.op, kernel.group, kernel.seq, kernel.bytes) == (
            mine.op,
            mine.group,
            mine.seq,
            mine.bytes,
        )
        assert kernel.start_ms == pytest.approx(2.4, abs=ROUNDED_MS)
        assert kernel.end_ms == pytest.approx(6.0, abs=ROUNDED_MS)
        assert line.memory is None
        assert "memory" in line.not_measured


def test_checking_again_adds_no_line_twice(tmp_path):
    write_records(tmp_path, 4)
    trace = write_trace(tmp_path / "trace.json", 4)
    check_run(tmp_path, 0, [trace])
    before = (tmp_path / steps_name(0)).read_bytes()
    check_run(tmp_path, 0, [trace])
    assert (tmp_path / steps_name(0)).read_bytes() == before


def test_the_report_keeps_both_sources_apart(tmp_path):
    write_records(tmp_path, 4)
    check_run(tmp_path, 0, [write_trace(tmp_path / "trace.json", 4)], profiled_steps=[0, 1])
    for rank in (0, 1):  # the same again as rank 1
        if rank:
            text = (tmp_path / steps_name(0)).read_text().replace('"rank":0', '"rank":1')
            (tmp_path / steps_name(1)).write_bytes(sealed_again(text.encode()))
    run = load_run(tmp_path, "run")
    assert run.source == "events"
    assert run.global_step.tolist() == [2, 3]  # without the steps that the profiler worked in
    kernels = run.other_sources["kineto"]
    assert kernels.global_step.tolist() == [0, 1, 2]
    assert kernels.metrics["hidden_ms"] == pytest.approx(1.6, abs=ROUNDED_MS)
    assert read_run(tmp_path / "run.json").coverage["profiled_steps"] == [0, 1]


def test_kernels_of_one_name_are_matched_in_the_order_of_their_ends(tmp_path):
    """RCCL runs every operation in ncclDevKernel_Generic."""
    write_records(tmp_path, 4)
    trace = write_trace(tmp_path / "trace.json", 4)
    trace.write_text(
        trace.read_text().replace("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", "ncclDevKernel_Generic_1")
    )
    (check,) = check_run(tmp_path, 0, [trace])
    assert (check.num_matched, check.leftovers) == (3, [])
    assert check.num_unknown_collectives == 4
    lines = [r for r in read_steps(tmp_path / steps_name(0)) if r.source == "kineto"]
    assert [[call.op for call in line.collectives or ()] for line in lines] == [["all_reduce"]] * 3


def test_one_name_and_one_too_many_is_not_guessed(tmp_path):
    write_records(tmp_path, 4)
    trace = write_trace(tmp_path / "trace.json", 4, extra_kernel=True)
    text = trace.read_text().replace("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", "ncclDevKernel_Generic_1")
    trace.write_text(text.replace("ncclDevKernel_AllGather_RING_LL", "ncclDevKernel_Generic_1"))
    (check,) = check_run(tmp_path, 0, [trace])
    assert (check.num_matched, check.num_records_without_kernel, check.num_kernels_without_record) == (
        0,
        3,
        4,
    )


def test_steps_without_details_still_get_their_kernels_numbers(tmp_path, caplog):
    """There is nothing to match, which is no leftover."""
    write_records(tmp_path, 4, detail_every=100)
    (check,) = check_run(tmp_path, 0, [write_trace(tmp_path / "trace.json", 4)])
    assert (check.steps, check.num_matched, check.num_kernels_without_record) == ([0, 1, 2], 0, 0)
    assert "no record" not in caplog.text
    line = [r for r in read_steps(tmp_path / steps_name(0)) if r.source == "kineto"][1]
    assert line.overlap.hidden_ms == pytest.approx(1.6, abs=ROUNDED_MS)
    assert line.collectives is None
    assert "kept in some steps" in line.not_measured["collectives"]


def test_a_kernel_without_a_record_is_counted_and_logged(tmp_path, caplog):
    write_records(tmp_path, 4)
    trace = write_trace(tmp_path / "trace.json", 4, extra_kernel=True)
    (check,) = check_run(tmp_path, 0, [trace])
    assert check.num_kernels_without_record == 1
    assert "AllGather" in check.leftovers[0]
    assert "1 communication kernels have no record" in caplog.text


def ask_for_traces(folder: Path, **profiling: Any) -> None:
    run = read_run(folder / "run.json")
    run.config = {"profiling": profiling}
    write_json(folder / "run.json", run)


@pytest.mark.parametrize(
    ("profiling", "has_gpu", "why"),
    [
        pytest.param({"enabled": True}, False, "no trace of a step was written", id="stopped-early"),
    ],
)
def test_a_run_that_asked_for_traces_and_has_none_says_why(profiling, has_gpu, why, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    write_records(tmp_path, 2)
    ask_for_traces(tmp_path, **profiling)
    check_run(tmp_path, 0, [])
    run = read_run(tmp_path / "run.json")
    assert run.not_measured == {"coverage.kernel_windows": why}
    assert "kernel_windows" not in run.coverage


def test_a_trace_that_could_not_be_checked_says_why_until_one_can_be(tmp_path):
    write_records(tmp_path, 4)
    ask_for_traces(tmp_path, enabled=True)
    (tmp_path / "empty.json").write_text('{"schemaVersion": 1, "traceEvents": []}')
    check_run(tmp_path, 0, [tmp_path / "empty.json"])
    assert "no GPU activity" in read_run(tmp_path / "run.json").not_measured["coverage.kernel_windows"]
    check_run(tmp_path, 0, [write_trace(tmp_path / "trace.json", 4)])
    assert read_run(tmp_path / "run.json").not_measured == {}


def test_a_run_that_asked_for_no_traces_keeps_its_run_json(tmp_path):
    write_records(tmp_path, 2)
    ask_for_traces(tmp_path)
    before = (tmp_path / "run.json").read_bytes()
    check_run(tmp_path, 0, [])
    assert (tmp_path / "run.json").read_bytes() == before


def test_other_ranks_leave_run_json_alone(tmp_path):
    write_records(tmp_path, 4)
    (tmp_path / steps_name(0)).rename(tmp_path / steps_name(1))
    before = (tmp_path / "run.json").read_bytes()
    check_run(tmp_path, 1, [write_trace(tmp_path / "trace.json", 4)])
    assert (tmp_path / "run.json").read_bytes() == before


def test_a_trace_without_a_gpu_is_no_check_and_no_error(tmp_path):
    write_records(tmp_path, 2)
    (tmp_path / "trace.json").write_text('{"schemaVersion": 1, "traceEvents": []}')
    assert check_run(tmp_path, 0, [tmp_path / "trace.json"]) == []
