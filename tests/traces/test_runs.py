"""Traces as runs of a report."""

import json

import msgspec
import numpy as np
import pytest

from aorta.account.judge.judged import judge
from aorta.account.load.traces.open import load_traces
from aorta.account.load.traces.steps import step_records
from aorta.errors import ReportError, TraceError
from aorta.records.reader import read_steps
from aorta.records.schema import StepRecord
from aorta.traces.kineto import parse_kineto
from aorta.traces.sources import open_source
from tests.traces.trace_writers import WRITERS, kineto, rocprofv3_json


def write_ranks(folder, num, late_us=0.0):
    """The last rank's collective starts late_us later; all end together."""
    for rank in range(num):
        data = json.loads(kineto(rank, num))
        for event in data["traceEvents"]:
            if event["name"].startswith("nccl") and event["cat"] == "kernel" and rank == num - 1:
                event["ts"] += late_us
                event["dur"] -= late_us
        (folder / f"rank{rank}.json").write_text(json.dumps(data))


def test_a_step_holds_all_work_of_its_window():
    """Window of step 2: 100 to 200 on the host. The unlinked kernel at 180 is in it, the one gemm too."""
    trace = parse_kineto(kineto(), "rank0.json")
    first, second = step_records(trace, 1)
    assert (first.global_step, second.global_step) == (1, 2)
    assert first.step_ms == pytest.approx(0.1)
    assert first.overlap.comm_ms == pytest.approx(0.040)
    assert first.overlap.compute_ms == pytest.approx(0.030)
    assert second.overlap.compute_ms == pytest.approx(0.045)
    assert second.overlap.exposed_copy_ms == pytest.approx(0.010)
    (c,) = first.collectives
    assert (c.op, c.bytes, c.ranks, c.group, c.seq, c.stream) == ("all_reduce", 4096, [0], "0", 0, "group")
    assert (c.start_ms, c.end_ms, c.launch_ms) == pytest.approx((0.050, 0.090, 0.019))
    assert c.algbw_gb_s == pytest.approx(4096 / 40e-6 / 1e9)
    assert second.collectives == []
    assert first.source == "kineto"
    assert "loss" in first.not_measured


def test_records_of_a_trace_are_records(tmp_path):
    """They can be written and read again."""
    path = tmp_path / "rank_0_metrics.jsonl"
    made = list(step_records(parse_kineto(kineto(), "rank0.json"), 1))
    path.write_bytes(b"".join(msgspec.json.encode(record) + b"\n" for record in made))
    read = list(read_steps(path))
    assert read == made


@pytest.mark.parametrize("name", WRITERS)
def test_every_format_becomes_a_run(tmp_path, name):
    file, write = WRITERS[name]
    write(tmp_path / file)
    run = load_traces(tmp_path, "x")
    assert run.global_step.tolist() == [1, 2]
    assert run.metrics["comm_ms"][0].tolist() == pytest.approx([0.040, 0.0])
    assert run.totals[0]["compute_ms"] == pytest.approx(0.075)
    assert run.totals[0]["num_kernels"] == 5
    assert isinstance(next(run.records(0)), StepRecord)
    if name != "rocprofv3-csv":
        assert run.record.devices[0]["name"] == "a device"
    (row,) = judge(run).collective_rows
    assert row.op == "all_reduce"
    known = name not in ("rocprofv3-csv", "nsys")
    assert row.bytes == (4096 if known else None)
    assert np.isnan(run.metrics["bytes.all_reduce"]).all() != known
    assert any("launches without a kernel" in note for note in run.notes)
    assert any("step 1 may be cut off: the first step" in note for note in run.notes)


def test_a_trace_without_steps_is_one_window(tmp_path):
    (tmp_path / "rank0.json").write_bytes(rocprofv3_json(marker_api=[]))
    run = load_traces(tmp_path, "x")
    assert run.global_step.tolist() == [0]
    assert run.metrics["step_ms"][0, 0] == pytest.approx(0.160)
    assert run.metrics["compute_ms"][0, 0] == pytest.approx(0.075)
    assert run.num_collectives.tolist() == [[1]]
    assert any("marks no steps" in note for note in run.notes)


@pytest.mark.heavy
@pytest.mark.parametrize("jobs", [1, 2])
def test_waits_are_metrics_of_the_run(tmp_path, jobs):
    """Rank 1 comes 25 µs late, at 75. Rank 0 computes until 60 and waits exposed from there."""
    write_ranks(tmp_path, 2, late_us=25)
    run = load_traces(tmp_path, "x", jobs=jobs)
    assert run.metrics["wait_ms.all_reduce"][:, 0].tolist() == pytest.approx([0.025, 0.0])
    assert run.metrics["transfer_ms.all_reduce"][:, 0].tolist() == pytest.approx([0.015, 0.015])
    assert run.metrics["exposed_wait_ms"].tolist() == [pytest.approx([0.015, 0.0]), [0.0, 0.0]]
    (row,) = judge(run).collective_rows
    assert (row.wait_ms, row.transfer_ms) == pytest.approx((0.0125, 0.015))
    assert row.busbw_gb_s == pytest.approx(4096 / 15e-6 / 1e9)
    (line,) = [note for note in run.notes if "arrived last" in note]
    assert line == "note: rank 1 arrived last in 1 of 1 collectives"


@pytest.mark.parametrize("ranks_are_told", [True, False])
def test_some_ranks_of_a_run_are_a_run_without_waits(tmp_path, ranks_are_told):
    """Two of three, in the one step with a collective: it is transfer or wait, and nobody can tell."""
    write_ranks(tmp_path, 3, late_us=25)
    (tmp_path / "rank2.json").unlink()
    if not ranks_are_told:
        for path in tmp_path.iterdir():
            data = json.loads(path.read_text())
            for event in data["traceEvents"]:
                event["args"].pop("Process Group Ranks", None)
            path.write_text(json.dumps(data))
    run = load_traces(tmp_path, "x")
    assert (run.ranks, run.record.world_size) == ([0, 1], 3)
    assert run.metrics["comm_ms"][:, 0].tolist() == pytest.approx([0.040, 0.040])
    assert np.isnan(run.metrics.get("exposed_wait_ms", np.full((2, 2), np.nan))[:, 0]).all()
    assert np.isnan(run.metrics.get("wait_ms.all_reduce", np.nan)).all()
    assert "2 of 3 ranks: waiting for the others is not split from transfer" in run.notes
    assert not any("not given" in note or "not found" in note for note in run.notes)


def test_a_group_that_is_there_whole_has_its_waits(tmp_path):
    """Of a run of eight ranks two are given, which are a group: 25 µs late as above."""
    write_ranks(tmp_path, 2, late_us=25)
    for path in tmp_path.iterdir():
        data = json.loads(path.read_text())
        data["distributedInfo"]["world_size"] = 8
        path.write_text(json.dumps(data))
    run = load_traces(tmp_path, "x")
    assert run.metrics["exposed_wait_ms"][:, 0].tolist() == pytest.approx([0.015, 0.0])
    assert any(note.startswith("2 of 8 ranks") for note in run.notes)


def test_a_rank_alone_has_no_waits(tmp_path):
    write_ranks(tmp_path, 1)
    run = load_traces(tmp_path, "x")
    assert not [name for name in run.metrics if "wait" in name]


def test_markup_in_names_stays_text(tmp_path):
    data = kineto().replace(b"Cijk_Alik_Bljk", b"<script>alert(1)</script>")
    (tmp_path / "rank0.json").write_bytes(data)
    trace = open_source(tmp_path).read(0)
    assert "<script>alert(1)</script>" in trace.timeline.names


@pytest.mark.parametrize(
    ("data", "error"),
    [(b"", TraceError), (kineto()[:-9], TraceError), (b'{"traceEvents": []}', TraceError)],
)
def test_faults_are_one_clear_line(tmp_path, data, error):
    (tmp_path / "rank0.json").write_bytes(data)
    with pytest.raises((error, ReportError)) as caught:
        load_traces(tmp_path, "x")
    assert "\n" not in str(caught.value)
