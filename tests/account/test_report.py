import gzip
import json
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from aorta.account.judge.judged import dataset, judge, statistic
from aorta.account.load.open import load_run
from aorta.errors import AortaError
from aorta.page.table import dataset_table
from aorta.page.write import Outputs, write_report
from aorta.records.schema import CollectiveRecord
from tests.dist.launch import run_python
from tests.records.run_folders import run_record, step_record, step_timeline, write_run

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "analysis" / "overlap_report.py"
SUMMARY_ALONE = Outputs(page=False, perfetto=False, parquet=False)


def plain_run(folder, num_steps=4, world_size=2, **step):
    """Every step alike: step 10, compute 8, comm 4.5, hidden 3.5, exposed 1, idle 1 ms."""
    records = [
        step_record(step_timeline(rank=rank, step=i, **step), world_size)
        for i in range(num_steps)
        for rank in range(world_size)
    ]
    return write_run(folder, records, run_record(world_size))


def report(tmp_path, *folders, **options):
    labels = [chr(ord("a") + i) for i in range(len(folders))]
    written = write_report(folders, labels, tmp_path / "out", outputs=SUMMARY_ALONE, **options)
    return written.text, json.loads((tmp_path / "out" / "summary.json").read_text())


# ---- summary.json ------------------------------------------------------------------------------


def test_summary_has_the_documented_layout(tmp_path):
    _, summary = report(tmp_path, plain_run(tmp_path / "run"))
    dataset = summary["datasets"]["a"]
    assert dataset["source"] == "events"
    assert list(dataset["ranks"]) == ["0", "1"]
    assert dataset["ranks"]["1"]["total"] == {
        "span_ms": 40.0,
        "comm_ms": 18.0,
        "compute_ms": 32.0,
        "hidden_ms": 14.0,
        "exposed_ms": 4.0,
        "idle_ms": 4.0,
        "num_kernels": None,
        "num_collectives": 8,
    }
    assert dataset["steps"]["exposed_ms"] == {"median": 1.0, "p95": 1.0, "min": 1.0, "max": 1.0}
    assert dataset["steps"]["overlap_ratio"]["median"] == pytest.approx(3.5 / 4.5)
    assert dataset["steps"]["comm_ms.all_gather"]["median"] == 3.0
    assert summary["comparison"] == {}


def test_min_and_max_are_over_ranks(tmp_path):
    """Rank medians 1 and 3 ms of exposure: the middle of the two, and both."""
    records = [
        step_record(step_timeline(exposed=1.0 + 2 * rank, rank=rank, step=i))
        for i in range(5)
        for rank in range(2)
    ]
    _, summary = report(tmp_path, write_run(tmp_path / "run", records))
    assert summary["datasets"]["a"]["steps"]["exposed_ms"] == {"median": 2, "p95": 2, "min": 1, "max": 3}


def test_a_number_that_was_not_measured_is_null_with_its_reason(tmp_path):
    reason = "the device does not tell"
    records = [
        step_record(
            line,
            1,
            overlap=msgspec.structs.replace(record.overlap, idle_ms=None),
            not_measured={"overlap.idle_ms": reason},
        )  # fmt: skip
        for i in range(4)
        for line in [step_timeline(step=i)]
        for record in [step_record(line, 1)]
    ]
    text, summary = report(tmp_path, write_run(tmp_path / "run", records))
    dataset = summary["datasets"]["a"]
    assert dataset["steps"]["idle_ms"] == {"median": None, "p95": None, "min": None, "max": None}
    assert dataset["not_measured"]["idle_ms"] == reason
    assert dataset["ranks"]["0"]["total"]["idle_ms"] is None
    assert dataset["ranks"]["0"]["total"]["comm_ms"] == 18.0
    assert f"not measured: idle ({reason})" in text


def test_no_communication_has_no_ratio_and_no_percentage(tmp_path):
    timeline = step_timeline()
    line = timeline.select(timeline.kind == 0)
    records = [step_record(replace(line, step=i), 1, num_collectives=0) for i in range(4)]
    text, summary = report(tmp_path, write_run(tmp_path / "run", records))
    assert summary["datasets"]["a"]["steps"]["overlap_ratio"]["median"] is None
    assert summary["datasets"]["a"]["not_measured"]["overlap_ratio"] == "there was no communication"
    assert "hidden" not in text.partition("definitions")[0]


def test_an_operation_of_some_steps_counts_as_zero_in_the_others(tmp_path):
    lines = [step_timeline(step=i) for i in range(5)]
    lines = [
        line if line.step == 2 else line.select(line.op != line.ops.index("reduce_scatter")) for line in lines
    ]
    _, summary = report(tmp_path, write_run(tmp_path / "run", [step_record(line, 1) for line in lines]))
    found = summary["datasets"]["a"]["steps"]["comm_ms.reduce_scatter"]
    assert found["median"] == 0.0


def test_sources_are_kept_apart(tmp_path):
    """Six steps by events, of which two were also traced: the statistic uses events alone."""
    records = [step_record(step_timeline(step=i), 1) for i in range(6)]
    records += [step_record(step_timeline(step=i, exposed=2.5, source="kineto"), 1) for i in (3, 4)]
    text, summary = report(tmp_path, write_run(tmp_path / "run", records))
    dataset = summary["datasets"]["a"]
    assert dataset["source"] == "events"
    assert dataset["steps"]["exposed_ms"]["max"] == 1.0
    assert dataset["other_sources"]["kineto"]["steps"]["exposed_ms"]["median"] == 2.5
    assert dataset["other_sources"]["kineto"]["num_steps"] == 2
    assert "kineto: 2 steps kept apart" in text


def test_reasons_are_those_of_the_source_that_statistics_use(tmp_path):
    records = [
        step_record(step_timeline(step=i), 1, not_measured={"overlap.exposed_copy_ms": "events see none"})
        for i in range(6)
    ]
    records += [
        step_record(step_timeline(step=i, source="kineto"), 1, not_measured={"memory": "not in a kernel"})
        for i in (3, 4)
    ]
    run = load_run(write_run(tmp_path / "run", records), "a")
    of_kernels = run.other_sources["kineto"].not_measured
    assert run.not_measured["exposed_copy_ms"] == "events see none"
    assert "memory" not in run.not_measured
    assert of_kernels["memory"] == "not in a kernel"
    assert "exposed_copy_ms" not in of_kernels
    assert of_kernels["peak_memory_bytes"] == "not in a kernel"


def test_a_barrier_has_no_bandwidth(tmp_path):
    """32 MB gathered by two ranks in 4 ms are 4 GB/s; a barrier moves nothing, which is not 0 GB/s."""

    def call(op, size, start_ms):
        return CollectiveRecord(
            op=op, stream="group", group="dp", ranks=[0, 1], bytes=size, dtype="", seq=0,
            start_ms=start_ms, end_ms=start_ms + 4.0, algbw_gb_s=None, busbw_gb_s=0.0,
        )  # fmt: skip

    both = [call("all_gather", 32_000_000, 0.0), call("barrier", 0, 5.0)]
    records = [
        step_record(step_timeline(rank=rank, step=i), collectives=both) for rank in range(2) for i in range(6)
    ]
    _, summary = report(tmp_path, write_run(tmp_path / "run", records))
    found = summary["datasets"]["a"]
    rows = {row["op"]: row["busbw_gb_s"] for row in found["collectives"]}
    assert rows == {"all_gather": pytest.approx(4.0), "barrier": None}
    assert found["steps"]["busbw_gb_s.all_gather"]["median"] == pytest.approx(4.0)
    assert found["steps"]["busbw_gb_s.barrier"]["median"] is None
    assert found["not_measured"]["busbw_gb_s.barrier"] == "it carries no bytes"


def test_sizes_that_a_trace_does_not_tell_are_not_0_bytes(tmp_path):
    """Two ranks whose second step of two has no gather: that one moves nothing."""
    gather = CollectiveRecord(
        op="all_gather", stream="group", group="dp", ranks=[0, 1], bytes=None, dtype="", seq=0,
        start_ms=1.0, end_ms=4.0, algbw_gb_s=None, busbw_gb_s=None,
    )  # fmt: skip
    records = [
        step_record(step_timeline(rank=rank, step=i), collectives=[gather] if i == 0 else [])
        for rank in range(2)
        for i in range(2)
    ]
    run = load_run(write_run(tmp_path / "run", records), "a")
    np.testing.assert_array_equal(run.metrics["count.all_gather"], [[1, 0]] * 2)
    np.testing.assert_array_equal(run.metrics["bytes.all_gather"], [[np.nan, 0]] * 2)


def test_a_source_that_not_every_rank_has_is_left_out_and_said(tmp_path):
    records = [step_record(step_timeline(rank=r, step=i)) for r in range(2) for i in range(6)]
    records += [step_record(step_timeline(rank=0, step=i, source="kineto")) for i in range(3)]
    text, summary = report(tmp_path, write_run(tmp_path / "run", records))
    assert "other_sources" not in summary["datasets"]["a"]
    assert "lines of source kineto are left out: no step has them from every rank" in text


def test_steps_that_not_every_rank_has_are_left_out_and_said(tmp_path):
    records = [step_record(step_timeline(rank=r, step=i)) for r in range(2) for i in range(8 - 3 * r)]
    text, summary = report(tmp_path, write_run(tmp_path / "run", records))
    dataset = summary["datasets"]["a"]
    assert dataset["num_steps"] + dataset["warmup"]["num_steps"] == 5
    assert "3 of 8 steps are left out: not every rank recorded them" in text


def test_steps_in_which_the_profiler_worked_are_left_out(tmp_path):
    records = [
        step_record(step_timeline(compute=8.0 if step < 4 else 80.0, rank=rank, step=step))
        for rank in range(2)
        for step in range(6)
    ]
    folder = write_run(tmp_path / "run", records, run_record(coverage={"profiled_steps": [4, 5]}))
    run = load_run(folder, "run")
    assert run.global_step.tolist() == [0, 1, 2, 3]
    assert "2 steps are left out: torch's profiler worked in them" in run.notes


def test_windows_that_overlap_are_said(tmp_path):
    """Steps of 10 ms that start 6 ms apart."""
    records = [step_record(step_timeline(step=i), 1, start_unix_ns=i * 6_000_000) for i in range(4)]
    text, _ = report(tmp_path, write_run(tmp_path / "run", records))
    assert "3 step windows overlap the next one" in text


def test_a_cut_off_last_line_is_said(tmp_path):
    folder = plain_run(tmp_path / "run")
    path = folder / "rank_1_metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-40])
    text, _ = report(tmp_path, folder)
    assert "rank_1_metrics.jsonl:4: the last line is cut off" in text


# ---- warm-up -----------------------------------------------------------------------------------


def test_warmup_can_be_given(tmp_path):
    _, summary = report(tmp_path, plain_run(tmp_path / "run", num_steps=9), warmup=5)
    assert summary["datasets"]["a"]["num_steps"] == 4
    assert summary["datasets"]["a"]["warmup"] == {"num_steps": 5, "rule": "as asked for"}


@pytest.mark.parametrize(("num_steps", "noted", "num_warmup"), [(12, 2, 3), (8, 2, 1), (90, 22, 1)])
def test_the_step_in_which_calls_were_noted_is_warm_up_at_the_beginning(
    tmp_path, num_steps, noted, num_warmup
):
    """It takes 200 ms of 10, for what the recorder does in it. A third of 8 steps ends before it, and the
    22nd of 90 steps is that of a job that went on."""
    records = [
        step_record(step_timeline(compute=200.0 if step == noted else 10.0, step=step), 1)
        for step in range(num_steps)
    ]
    folder = write_run(tmp_path / "run", records, run_record(coverage={"noted_step": noted}, world_size=1))
    assert judge(load_run(folder, "run")).num_warmup == num_warmup


def test_statistic_by_hand():
    """Ranks' medians 2 and 5; percentiles of [1, 2, 3] and [5, 5, 5] at 95 %: 2.9 and 5."""
    found = statistic(np.array([[1.0, 2.0, 3.0], [5.0, 5.0, 5.0]]))
    assert (found.median, found.p95, found.min, found.max) == pytest.approx((3.5, 3.95, 2.0, 5.0))


# ---- comparison --------------------------------------------------------------------------------


@pytest.mark.heavy
def test_three_runs_are_compared_only_when_asked(tmp_path):
    folders = [plain_run(tmp_path / name) for name in "xyz"]
    _, summary = report(tmp_path, *folders)
    assert summary["comparison"] == {}
    _, summary = report(tmp_path, *folders, reference="c", candidate="a")
    assert summary["comparison"]["step_ms"]["ratio"] == 1.0


# ---- the table and the picture -----------------------------------------------------------------


def test_the_table(tmp_path):
    text, _ = report(tmp_path, plain_run(tmp_path / "run", num_steps=12))
    assert text.splitlines()[:14] == [
        "a: a step takes 10.0 ms; 10 % of it is exposed communication, 10 % is idle;"
        " 78 % of communication is hidden under compute",
        "",
        "a   2 x Invented GPU   bf16   11 steps   source: events",
        "",
        "                          mean   of step   ranks",
        "compute                4.50 ms      45 %   4.50 to 4.50",
        "hidden communication   3.50 ms      35 %   3.50 to 3.50",
        "communication          1.00 ms      10 %   1.00 to 1.00",
        "idle                   1.00 ms      10 %   1.00 to 1.00",
        "step                   10.0 ms             10.0 to 10.0   of a rank: median 10.0, p95 10.0",
        "",
        "                    mean   exposed",
        "all_gather       3.00 ms   1.00 ms",
        "reduce_scatter   1.50 ms   0.00 ms",
    ]
    assert text.endswith("summary.json")
    assert "warning" not in text


def test_a_wide_spread_is_a_warning(tmp_path):
    records = [step_record(step_timeline(step=i, idle=30.0 if i % 5 == 4 else 1.0), 1) for i in range(20)]
    text, _ = report(tmp_path, write_run(tmp_path / "run", records))
    assert "warning: step times vary widely: p95 is 3.9 times the median" in text


def test_few_steps_are_a_warning(tmp_path):
    text, _ = report(tmp_path, plain_run(tmp_path / "run", num_steps=3))
    assert "warning: only 2 steps judged" in text


def test_host_bound_steps_are_said(tmp_path):
    records = []
    for i in range(12):
        record = step_record(step_timeline(step=i), 1)
        overlap = msgspec.structs.replace(record.overlap, host_bound=i >= 8, starved_bound_ms=3.0)
        records.append(msgspec.structs.replace(record, overlap=overlap))
    text, summary = report(tmp_path, write_run(tmp_path / "run", records))
    assert summary["datasets"]["a"]["host_bound_steps"] == 4
    assert "host-bound: 4 of 11 steps; in these, compute, comm and hidden are upper bounds" in text


def test_unknown_devices_are_counted_as_ranks(tmp_path):
    folder = plain_run(tmp_path / "run")
    (folder / "run.json").unlink()
    text, _ = report(tmp_path, folder)
    assert "\na   2 ranks   3 steps" in text
    assert "run.json is missing" in text


def test_tables_take_markup_as_text(tmp_path):
    folder = plain_run(tmp_path / "run")
    one = dataset("[red]x[/red]", [judge(load_run(folder, "[red]x[/red]"))])
    assert "[red]x[/red]" in dataset_table(one)


# ---- what cannot be reported -------------------------------------------------------------------


def broken(tmp_path, kind):
    """A folder with one fault, and the words of its error."""
    folder = tmp_path / "bad"
    match kind:
        case "missing folder":
            return folder, "there is no folder"
        case "a file":
            folder.write_text("")
            return folder, "is empty"
        case "empty folder":
            folder.mkdir()
            return folder, "holds neither rank_<n>_metrics.jsonl nor"
        case "no steps":
            folder.mkdir()
            (folder / "rank_0_metrics.jsonl").write_text("")
            return folder, "holds no step"
        case "missing rank":
            plain_run(folder, world_size=3)
            (folder / "rank_1_metrics.jsonl").unlink()
            return folder, "lacks rank 1 of 3"
        case "mixed runs":
            plain_run(folder, world_size=2)
            write_run(folder, [step_record(step_timeline(rank=2), world_size=4)])
            return folder, "mixes runs of 2 and 4 ranks"
        case "another run.json":
            plain_run(folder, world_size=2)
            (folder / "run.json").write_bytes(msgspec.json.encode(run_record(8)))
            return folder, "mixes runs of 2 and 8 ranks"
        case "duplicate rank":
            plain_run(folder, world_size=2)
            data = (folder / "rank_0_metrics.jsonl").read_bytes()
            (folder / "rank_00_metrics.jsonl").write_bytes(data)
            return folder, "rank 0 appears twice"
        case "renamed rank":
            plain_run(folder, world_size=1)
            (folder / "rank_0_metrics.jsonl").rename(folder / "rank_4_metrics.jsonl")
            return folder, "holds records of rank 0"
        case "repeated step":
            plain_run(folder, world_size=1)
            path = folder / "rank_0_metrics.jsonl"
            path.write_bytes(path.read_bytes() * 2)
            return folder, "was written as line 1 and follows line"
        case "two ranks in a file":
            plain_run(folder, world_size=2)
            a, b = folder / "rank_0_metrics.jsonl", folder / "rank_1_metrics.jsonl"
            a.write_bytes(a.read_bytes() + b.read_bytes())
            return folder, "mixes runs: rank 0 and rank 1 of 2"
        case "other schema":
            plain_run(folder, world_size=1)
            path = folder / "rank_0_metrics.jsonl"
            path.write_bytes(path.read_bytes().replace(b'"schema":3', b'"schema":9'))
            return folder, "schema 9"
        case "not records":
            folder.mkdir()
            (folder / "rank_0_metrics.jsonl").write_text("{}\n")
            return folder, "not a step record"
        case "run.json is no run":
            plain_run(folder, world_size=1)
            (folder / "run.json").write_text("{]")
            return folder, "not a run record"
        case "no common step":
            write_run(folder, [step_record(step_timeline(rank=r, step=r)) for r in range(2)])
            return folder, "no step was recorded by every rank from one source"
    raise AssertionError(kind)


FAULTS = [
    "missing folder",
    "a file",
    "empty folder",
    "no steps",
    "missing rank",
    "mixed runs",
    "another run.json",
    "duplicate rank",
    "renamed rank",
    "repeated step",
    "two ranks in a file",
    "other schema",
    "not records",
    "run.json is no run",
    "no common step",
]


@pytest.mark.heavy
@pytest.mark.parametrize("kind", FAULTS)
def test_a_fault_is_one_clear_line_and_changes_nothing(tmp_path, kind):
    good = plain_run(tmp_path / "good")
    report(tmp_path, good)
    before = {path: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    folder, words = broken(tmp_path, kind)
    with pytest.raises(AortaError) as error:
        write_report([good, folder], ["a", "b"], tmp_path / "out", outputs=SUMMARY_ALONE)
    assert words in str(error.value)
    assert "\n" not in str(error.value)
    assert {path: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before


@pytest.mark.parametrize(
    ("labels", "options", "words"),
    [
        (["a"], {}, "got 2 runs and 1 --label"),
        (["a", "a"], {}, "is given twice with label a"),
        (["a", "../b"], {}, "cannot be part of a file name"),
        (["a", ""], {}, "cannot be part of a file name"),
        (["a", "b\x1b[31m"], {}, "cannot be part of a file name"),
        (["a", "b"], {"reference": "c"}, "--reference c is not one of the labels: a, b"),
        (["a", "b"], {"candidate": "c"}, "--candidate c is not one of the labels"),
        (["a", "b"], {"reference": "a", "candidate": "a"}, "are both a"),
        (["a", "b"], {"warmup": 99}, "warm-up of 99 leaves no step"),
        (["a", "b"], {"warmup": -1}, "warm-up of -1 is none"),
    ],
)
def test_a_wrong_question_is_one_clear_line(tmp_path, labels, options, words):
    folder = plain_run(tmp_path / "run")
    with pytest.raises(AortaError, match=words):
        write_report([folder, folder], labels, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_an_output_that_is_a_file_is_one_clear_line(tmp_path):
    (tmp_path / "out").write_text("mine")
    with pytest.raises(AortaError, match="is a file, not a folder"):
        report(tmp_path, plain_run(tmp_path / "run"))
    assert (tmp_path / "out").read_text() == "mine"


# ---- the command -------------------------------------------------------------------------------


def command(*arguments, cwd):
    return run_python(SCRIPT, *arguments, cwd=cwd)


def test_the_command_writes_prints_and_exits_0(tmp_path):
    folder = plain_run(tmp_path / "run")
    flags = ("--no-page", "--no-perfetto", "--no-parquet")
    result = command("--log-dir", folder, "--label", "x", "--output", "out", *flags, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(
        "x: a step takes 10.0 ms (mean of 3 judged steps, 2 ranks, source: events)"
    )
    assert result.stdout.rstrip().endswith("wrote out/summary.json")
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["summary.json"]


def test_the_command_fails_in_one_line_with_status_2(tmp_path):
    result = command("--log-dir", "none", "--label", "x", "--output", "out", cwd=tmp_path)
    assert result.returncode == 2
    assert result.stderr == "error: there is no folder or trace none\n"
    assert result.stdout == ""
    assert not (tmp_path / "out").exists()


def broken_trace(tmp_path, kind):
    """A --log-dir of traces with one fault, and the words of its error."""
    path = tmp_path / "trace.json"
    event = {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "ts": 1, "dur": 2}
    whole = json.dumps({"traceEvents": [event | {"args": {"device": 0, "stream": 7, "correlation": 1}}]})
    match kind:
        case "cut off":
            path.write_text(whole[:-20])
            return path, "is not a readable Kineto trace"
        case "empty":
            path.write_text("")
            return path, "is empty"
        case "another JSON":
            path.write_text('{"a": 1}')
            return path, "is JSON but no trace"
        case "no kernels":
            path.write_text('{"traceEvents": []}')
            return path, "holds no GPU activity"
        case "text":
            path.write_text("hello")
            return path, "is not one of Kineto traces"
        case "damaged gzip":
            path = tmp_path / "trace.json.gz"
            path.write_bytes(gzip.compress(whole.encode())[:-9])
            return path, "trace.json.gz"
        case "a rank twice":
            folder = tmp_path / "folder"
            folder.mkdir()
            info = {"rank": 0, "world_size": 2}
            for name in ("a.json", "b.json"):
                (folder / name).write_text(json.dumps(json.loads(whole) | {"distributedInfo": info}))
            return folder, "rank 0 appears twice"
    raise AssertionError(kind)


@pytest.mark.parametrize(
    "kind", ["cut off", "empty", "another JSON", "no kernels", "text", "damaged gzip", "a rank twice"]
)
def test_a_broken_trace_is_one_clear_line_with_status_2(tmp_path, kind):
    report(tmp_path, plain_run(tmp_path / "good"))
    before = {path: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    path, words = broken_trace(tmp_path, kind)
    result = command("--log-dir", path, "--label", "x", "--output", "out", cwd=tmp_path)
    assert result.returncode == 2
    assert words in result.stderr
    assert result.stderr.startswith("error: ")
    assert str(path) in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert {path: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before


def test_the_command_writes_everything(tmp_path):
    """All outputs of two labels, of which one has two runs."""
    arguments = []
    for name, label in (("a", "x"), ("b", "y"), ("c", "y")):
        arguments += ["--log-dir", plain_run(tmp_path / name, num_steps=10), "--label", label]
    result = command(*arguments, "--output", "out", "--reference", "y", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {
        "summary.json",
        "report.html",
        "steps.parquet",
        *(f"{label}.perfetto.json.gz" for label in "xy"),
    }
    assert result.stdout.startswith("x is as fast as y within 3 %: step time")


def test_the_table_gives_the_share_of_the_mean_step_and_says_so(tmp_path):
    """Steps of 10, 20 and 40 ms, 3, 1 and 2 ms of them exposed: 2 of 23.3 ms; shares of 30, 5 and 5 %."""
    shapes = ((4, 4, 2), (8, 1, 11), (8, 2, 30))
    records = [
        step_record(step_timeline(compute=compute, exposed=exposed, idle=idle, rank=rank, step=step))
        for step, (compute, exposed, idle) in enumerate(shapes)
        for rank in range(2)
    ]
    text, summary = report(tmp_path, write_run(tmp_path / "run", records, run_record(2)), warmup=0)
    [row] = [line for line in text.splitlines() if line.startswith("communication")]
    assert "9 %" in row
    assert summary["datasets"]["a"]["steps"]["exposed_per_step"]["median"] == pytest.approx(0.05)
    assert "means over the judged steps and ranks, as parts of the step: the rows add up to it" in text
