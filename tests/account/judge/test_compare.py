"""Two sides against each other: verdicts, what is like with like, the step time taken apart."""

import dataclasses
import json
import math
import random
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from aorta.account.judge.decompose import Change, Share
from aorta.account.judge.sentences import _mostly
from aorta.account.metrics import MEANINGS, meaning
from aorta.account.model import ConfidenceInterval, Decomposition, Part, PhaseChange
from aorta.errors import AortaError
from aorta.page.html import page
from aorta.page.write import Outputs, make_report, write_report
from aorta.records.schema import DeviceRecord, HostSpan, HostUse
from tests.account.reports_in_memory import records_of
from tests.records.run_folders import noisy_run, run_record, step_record, step_timeline, write_run

SUMMARY_ALONE = Outputs(page=False, perfetto=False, parquet=False)
PNG = b"\x89PNG\r\n\x1a\n"


def comparison(*folders, labels="ab", **options):
    return make_report(folders, list(labels), **options).comparison


def run_of(folder, num_steps=20, world_size=2, change=None, run=None, **step):
    """Every step alike: step 10, compute 8, comm 4.5, hidden 3.5, exposed 1, idle 1 ms."""
    records = []
    for i in range(num_steps):
        for rank in range(world_size):
            record = step_record(step_timeline(rank=rank, step=i, **step), world_size)
            records.append(record if change is None else change(record))
    return write_run(folder, records, run or run_record(world_size))


def detailed_run(folder, slowdown=1.0, seed=0, num_steps=40, gather="all_gather", **options):
    """A run whose steps hold their collectives."""
    by_rank = records_of(num_steps=num_steps, slowdown=slowdown, seed=seed, **options)
    records = [_gathers_called(gather, record) for rows in by_rank.values() for record in rows]
    return write_run(folder, records, run_record(2))


def _gathers_called(name, record):
    rows = [replace(row, op=name) if row.op == "all_gather" else row for row in record.collectives]
    return replace(record, collectives=rows)


def test_a_comparison_gives_the_share_of_cores_taken_that_the_report_has(tmp_path):
    """Of steps of 10 ms on a CPU, in which rank 1 waits for a core for 1 or 3 ms."""

    def make(ready_ms):
        def change(record):
            use = HostUse(5.0, ready_ms * (record.rank == 1))
            return replace(record, source="host", host_use=use)

        return change

    folders = [run_of(tmp_path / name, change=make(ms)) for name, ms in (("a", 1.0), ("b", 3.0))]
    report = make_report(folders, ["a", "b"])
    share = {
        name: report.summary["datasets"][name]["account"]["cells"]["core_taken"]["share"] for name in "ab"
    }
    (said,) = (note for note in report.comparison.notes if "which is allowed for" in note)
    assert f"(a {100 * share['a']:.1f} % and b {100 * share['b']:.1f} %)" in said.replace("\u00a0", " ")


# ---- verdicts ----------------------------------------------------------------------------------


@pytest.mark.heavy
def test_a_planted_slowdown_is_worse_and_the_rest_is_not(tmp_path):
    found = comparison(
        noisy_run(tmp_path / "a", 50), noisy_run(tmp_path / "b", 50, slowdown=1.06, seed=1)
    ).metrics
    assert {name: found[name].verdict for name in ("step_ms", "compute_ms", "exposed_ms", "idle_ms")} == {
        "step_ms": "worse",
        "compute_ms": "worse",
        "exposed_ms": "cannot tell",
        "idle_ms": "cannot tell",
    }
    step = found["compute_ms"]
    assert step.interval.low < 1.06 < step.interval.high
    assert step.p_value <= step.p_adjusted < 0.01
    assert step.difference == pytest.approx(step.candidate - step.reference)


@pytest.mark.heavy
def test_a_speedup_is_better(tmp_path):
    a, b = noisy_run(tmp_path / "a", 50, slowdown=1.06), noisy_run(tmp_path / "b", 50, seed=1)
    found = comparison(a, b)
    assert found.metrics["step_ms"].verdict == "better"
    assert found.headline.startswith("b is faster than a: step time -4.")
    assert "most of it compute" in found.headline or "all of it compute" in found.headline
    turned = comparison(a, b, reference="b")
    assert turned.metrics["step_ms"].verdict == "worse"


@pytest.mark.heavy
def test_a_run_against_its_likes_has_no_difference(tmp_path):
    found = comparison(noisy_run(tmp_path / "a", 40), noisy_run(tmp_path / "b", 40, seed=7))
    assert {one.verdict for one in found.metrics.values()} <= {"same", "cannot tell", "not judged"}
    assert "b is as fast as a within 3 %: step time" in found.headline or "would need" in found.headline


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("step", "metric", "verdict"),
    [
        ({"exposed": 2.0}, "exposed_ms", "worse"),
        ({"exposed": 0.5}, "exposed_ms", "better"),
        ({"exposed": 2.0}, "overlap_ratio", "worse"),
        ({"exposed": 2.0}, "hidden_ms", "different"),
        ({"idle": 0.5}, "idle_ms", "better"),
        ({"compute": 9.0}, "compute_ms", "worse"),
    ],
)
def test_direction_of_every_kind_of_metric(tmp_path, step, metric, verdict):
    """Steps without any noise: what differs differs."""
    found = comparison(run_of(tmp_path / "a"), run_of(tmp_path / "b", **step)).metrics
    assert found[metric].verdict == verdict
    assert found["comm_ms"].verdict in ("same", "cannot tell")


@pytest.mark.heavy
def test_every_metric_has_a_meaning(tmp_path):
    found = comparison(detailed_run(tmp_path / "a"), detailed_run(tmp_path / "b", seed=1)).metrics
    for name in found:
        assert name.partition(".")[0] in MEANINGS, name
    assert meaning("busbw_gb_s.all_gather").better == "higher"
    assert not meaning("comm_ms.all_gather").judged


@pytest.mark.heavy
def test_collectives_are_compared(tmp_path):
    found = comparison(
        detailed_run(tmp_path / "a"), detailed_run(tmp_path / "b", seed=1, num_collectives=4)
    ).metrics
    assert (found["count.all_gather"].reference, found["count.all_gather"].candidate) == (1.0, 2.0)
    assert found["count.all_gather"].verdict == "different"
    assert found["bytes.all_gather"].ratio == 2.0
    assert found["duration_ms.all_gather"].reference == pytest.approx(12.0)
    # One of 64 MiB in 12 ms against two of them in the same time, all-gather of two ranks: half.
    assert found["busbw_gb_s.all_gather"].reference == pytest.approx(2**26 / 12e6 / 2)
    assert found["busbw_gb_s.all_gather"].ratio == pytest.approx(2.0)
    assert found["busbw_gb_s.all_gather"].verdict == "better"


@pytest.mark.heavy
def test_few_steps_are_not_judged_and_it_is_said_why(tmp_path):
    found = comparison(run_of(tmp_path / "a", 20), run_of(tmp_path / "b", 8))
    step = found.metrics["step_ms"]
    assert (step.verdict, step.interval, step.ratio) == ("not judged", None, 1.0)
    assert step.reason == "b: 7 judged steps, 8 are needed"
    why = "b against a is not judged: b: 7 judged steps, 8 are needed"
    assert found.headline == f"{why}. Step time: b 10.0 ms, a 10.0 ms"


@pytest.mark.heavy
def test_runs_of_unlike_length_are_said_to_be_so(tmp_path):
    """What settles slowly weighs on the shorter run, and is no difference between the two."""
    short, long = noisy_run(tmp_path / "a", 14), noisy_run(tmp_path / "b", 60, seed=1)
    assert any("the runs differ in length (a: 1" in note for note in comparison(short, long).notes)
    alike = noisy_run(tmp_path / "c", 50, seed=2)
    assert not any("differ in length" in note for note in comparison(alike, long).notes)


@pytest.mark.heavy
def test_an_operation_that_one_side_does_not_run_is_said_to_be_absent_there(tmp_path):
    """Not that its source could not see it."""
    other = detailed_run(tmp_path / "b", seed=1, gather="all_reduce")
    found = comparison(detailed_run(tmp_path / "a"), other).metrics
    assert found["duration_ms.all_reduce"].reason == "a: no all_reduce was recorded"


@pytest.mark.heavy
def test_what_one_side_did_not_measure_is_not_judged(tmp_path):
    def without_idle(record):
        overlap = msgspec.structs.replace(record.overlap, idle_ms=None)
        return msgspec.structs.replace(
            record, overlap=overlap, not_measured={"overlap.idle_ms": "no clock of it"}
        )

    found = comparison(run_of(tmp_path / "a"), run_of(tmp_path / "b", change=without_idle))
    idle = found.metrics["idle_ms"]
    assert (idle.verdict, idle.reference, idle.candidate) == ("not judged", 1.0, None)
    assert idle.reason == "b: no clock of it"
    assert [part.name for part in found.decomposition.parts] == [
        "compute",
        "hidden",
        "communication",
        "idle",
        "not_measured",
    ]


@pytest.mark.heavy
def test_alone_and_among_many(tmp_path):
    """Between a slowdown that is not seen and one that is lies one that alone would be called."""
    a = noisy_run(tmp_path / "a", 20, world_size=1)
    for slowdown in np.linspace(1.0, 1.08, 33).tolist():
        b = noisy_run(tmp_path / f"b{slowdown}", 20, world_size=1, slowdown=slowdown, seed=1)
        compute = comparison(a, b).metrics["compute_ms"]
        assert (compute.verdict == "worse") == (compute.p_adjusted <= 0.05)
        if compute.p_value <= 0.05 < compute.p_adjusted:
            assert compute.reason == "significant alone, but among 5 parts of the step it may be chance"
            return
    pytest.fail("no such slowdown")


@pytest.mark.heavy
def test_the_number_of_metrics_that_were_looked_at_is_said(tmp_path):
    found = comparison(noisy_run(tmp_path / "a", 20), noisy_run(tmp_path / "b", 20, seed=1))
    judged = [one for one in found.metrics.values() if one.p_adjusted is not None]
    assert found.num_judged == len(judged) >= 6
    assert any(f"any of {found.num_judged - 1} other metrics" in note for note in found.notes)


# ---- several runs ------------------------------------------------------------------------------


def several(tmp_path, label, slowdowns, seed):
    return [
        noisy_run(tmp_path / f"{label}{i}", 20, slowdown=slowdown, seed=seed + i)
        for i, slowdown in enumerate(slowdowns)
    ]


@pytest.mark.heavy
def test_one_run_a_side_allows_for_what_runs_differ_by(tmp_path):
    found = comparison(noisy_run(tmp_path / "a", 20), noisy_run(tmp_path / "b", 20, seed=1))
    assert found.scope == (
        "one run on each side: runs of one job are taken to differ by 1.0 % (standard deviation);"
        " `aorta ab` measures it"
    )
    assert "if runs of one job differ by no more than the 1.0 % that are assumed" in found.notes[-1]


@pytest.mark.heavy
def test_a_spread_of_runs_that_is_known_is_used(tmp_path):
    a, b = noisy_run(tmp_path / "a", 60), noisy_run(tmp_path / "b", 60, seed=1)
    known, unknown = comparison(a, b, run_spread=0.001), comparison(a, b)
    assert known.scope == "one run on each side: runs differ by 0.1 % (standard deviation, given)"
    assert "assumed" not in known.notes[-1]
    widths = [one.metrics["step_ms"].interval for one in (known, unknown)]
    assert widths[0].high - widths[0].low < 0.5 * (widths[1].high - widths[1].low)


@pytest.mark.heavy
def test_runs_that_differ_among_themselves_show_no_difference(tmp_path):
    """1 % apart on average, with 4 % between runs of a side; a single pair of them would be called."""
    a = several(tmp_path, "a", (0.96, 1.0, 1.04), seed=0)
    b = several(tmp_path, "b", (0.97, 1.01, 1.05), seed=10)
    found = comparison(*a, *b, labels="aaabbb")
    assert found.metrics["step_ms"].verdict in ("same", "cannot tell")
    assert found.scope == "3 runs of a and 3 of b: the verdict holds for runs like these"
    assert comparison(a[0], b[2]).metrics["step_ms"].verdict == "worse"


@pytest.mark.heavy
def test_runs_that_agree_show_a_difference(tmp_path):
    a = several(tmp_path, "a", (1.0, 1.0, 1.0), seed=0)
    b = several(tmp_path, "b", (1.05, 1.05, 1.05), seed=10)
    written = write_report([*a, *b], list("aaabbb"), tmp_path / "out", outputs=SUMMARY_ALONE)
    content = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert content["comparison"]["step_ms"]["verdict"] == "worse"
    dataset = content["datasets"]["a"]
    assert dataset["num_runs"] == len(dataset["runs"]) == 3
    assert dataset["num_steps"] == 57
    medians = [run["steps"]["step_ms"]["median"] for run in dataset["runs"]]
    assert dataset["steps"]["step_ms"]["median"] == pytest.approx(np.mean(medians))
    assert content["comparison"]["step_ms"]["reference"] == pytest.approx(np.mean(medians))
    assert "3 runs of a and 3 of b" in written.text


@pytest.mark.heavy
def test_a_side_of_one_run_borrows_the_spread_of_the_other(tmp_path):
    a = several(tmp_path, "a", (0.9, 1.1), seed=0)
    found = comparison(*a, noisy_run(tmp_path / "b", 20, slowdown=1.05, seed=9), labels="aab")
    assert found.metrics["step_ms"].verdict in ("same", "cannot tell")
    assert found.scope.endswith("the side with one run is assumed to vary as the other does")


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("step", "words"),
    [
        ({"world_size": 4}, r"runs differ in ranks \(2, 4\)"),
        ({"source": "kineto"}, r"runs differ in source \(events, kineto\)"),
    ],
)
def test_runs_of_a_label_must_be_alike(tmp_path, step, words):
    a, b = run_of(tmp_path / "a"), run_of(tmp_path / "b", **step)
    with pytest.raises(AortaError, match=words):
        make_report([a, b], ["x", "x"])


# ---- the step time taken apart -------------------------------------------------------------------


@pytest.mark.heavy
def test_parts_by_hand(tmp_path):
    """Busy + 1, exposed + 0.5, idle - 0.25 ms; of as long a collective 0.5 less is hidden."""
    found = comparison(
        run_of(tmp_path / "a"), run_of(tmp_path / "b", compute=9.0, exposed=1.5, idle=0.75)
    ).decomposition
    assert {part.name: part.difference_ms for part in found.parts} == pytest.approx(
        {"compute": 1.5, "hidden": -0.5, "communication": 0.5, "idle": -0.25}
    )
    assert found.step.difference_ms == pytest.approx(1.25)


@pytest.mark.heavy
@pytest.mark.parametrize("seed", range(4))
def test_parts_add_up_to_the_step(tmp_path, seed):
    found = comparison(
        noisy_run(tmp_path / "a", 30, seed=seed),
        noisy_run(tmp_path / "b", 25, slowdown=1.02, seed=seed + 9, world_size=3),
    ).decomposition
    for value in ("reference_ms", "candidate_ms", "difference_ms"):
        parts = sum(getattr(part, value) for part in found.parts)
        assert parts == pytest.approx(getattr(found.step, value), abs=1e-9)


@pytest.mark.heavy
def test_parts_of_several_runs_add_up(tmp_path):
    a = several(tmp_path, "a", (0.9, 1.1), seed=0)
    found = comparison(*a, noisy_run(tmp_path / "b", 20), labels="aab").decomposition
    assert sum(part.difference_ms for part in found.parts) == pytest.approx(found.step.difference_ms)


@pytest.mark.heavy
def test_exposed_copies_are_a_part_of_their_own(tmp_path):
    def copies(record):
        return msgspec.structs.replace(
            record, overlap=msgspec.structs.replace(record.overlap, exposed_copy_ms=0.25)
        )

    a = run_of(tmp_path / "a", source="kineto", change=copies)
    found = comparison(a, run_of(tmp_path / "b", source="kineto", idle=2.0)).decomposition
    parts = {part.name: part.difference_ms for part in found.parts}
    assert parts == pytest.approx(
        {"compute": 0, "hidden": 0, "communication": 0, "copy": -0.25, "idle": 1.25}
    )


@pytest.mark.heavy
def test_rare_slow_steps_are_told_apart_from_slower_steps(tmp_path):
    """Every 10th step of b takes 60 ms longer: typical steps agree, means do not; no gate may pass it."""
    records = [step_record(step_timeline(step=i, idle=61 if i % 10 == 9 else 1), 1) for i in range(60)]
    b = write_run(tmp_path / "b", records, run_record(1))
    found = comparison(run_of(tmp_path / "a", 60, world_size=1), b)
    assert found.metrics["step_ms"].verdict == "cannot tell"
    assert "rare slow steps move the mean: 10.0 and 16.1 ms" in found.headline


# ---- like with like ------------------------------------------------------------------------------


@pytest.mark.heavy
def test_events_and_kernels_compare_step_and_comm_alone(tmp_path):
    found = comparison(run_of(tmp_path / "a"), run_of(tmp_path / "b", source="kineto", compute=9.0))
    assert found.metrics["step_ms"].verdict == "worse"
    for name in ("compute_ms", "hidden_ms", "exposed_ms", "idle_ms", "overlap_ratio"):
        assert found.metrics[name].verdict == "not judged"
        assert found.metrics[name].ratio is None
        assert "events and kineto mean different things by compute" in found.metrics[name].reason
    assert found.decomposition is None
    assert found.notes[0].startswith("sources differ (a: events, b: kineto)")


@pytest.mark.heavy
def test_kernel_sources_mean_the_same(tmp_path):
    found = comparison(run_of(tmp_path / "a", source="rocprofv3"), run_of(tmp_path / "b", source="kineto"))
    assert found.metrics["compute_ms"].verdict in ("same", "cannot tell")
    assert found.notes[0] == "sources differ (a: rocprofv3, b: kineto)"


def one_window(source, **step):
    """A trace of 15 s without steps."""
    return dict(num_steps=1, world_size=1, source=source, compute=300.0, idle=14_699.0, **step)


@pytest.mark.heavy
def test_a_window_without_steps_is_compared_by_shares_alone(tmp_path):
    a = run_of(tmp_path / "a", source="kineto", world_size=1)
    found = comparison(a, run_of(tmp_path / "b", **one_window("rocprofv3")))
    assert found.metrics["step_ms"].ratio is None
    assert found.metrics["step_ms"].reason == "b marks no steps: its numbers are of all that was read"
    assert found.headline.endswith(". Share of exposed communication: b 0 %, a 10 %")
    said = page(make_report([a, tmp_path / "b"], ["a", "b"])).replace("\u00a0", " ")
    assert "Share of exposed communication: b 0 %, a 10 %" in said
    assert "exposed / step" in said
    assert "not broken down: b marks no steps" in said
    assert found.metrics["idle_per_step"].candidate == pytest.approx(14_699 / 15_000)
    assert found.metrics["idle_per_step"].ratio == pytest.approx(14_699 / 15_000 / 0.1)
    assert found.decomposition is None


@pytest.mark.heavy
def test_differing_settings_come_first(tmp_path):
    a = run_of(
        tmp_path / "a",
        run=run_record(
            config={"training": {"precision": "bf16", "output_dir": "x"}},
            versions={"torch": "2.11", "nccl": "2.28"},
            environment={"NCCL_ALGO": "Ring"},
        ),
    )
    b = run_of(
        tmp_path / "b",
        run=run_record(
            config={"training": {"precision": "fp32", "output_dir": "y"}},
            versions={"torch": "2.11", "rccl": "2.27"},
            devices=[{"name": "Other GPU"}] * 2,
        ),
    )
    written = write_report([a, b], ["a", "b"], tmp_path / "out", outputs=SUMMARY_ALONE)
    rows = [(s.group, s.name, s.reference, s.candidate) for s in written.report.comparison.differences]
    assert rows == [
        ("devices", "devices", "2 x Invented GPU", "2 x Other GPU"),
        ("config", "training.precision", "bf16", "fp32"),
        ("versions", "nccl", "2.28", None),
        ("versions", "rccl", None, "2.27"),
        ("environment", "NCCL_ALGO", "Ring", None),
    ]
    lines = written.text.splitlines()
    assert lines[0].startswith("b is as fast as a within 3 %: step time 0.0 %")
    assert lines[2].split() == ["different", "settings", "a", "b"]
    assert lines[6].split() == ["versions:", "rccl", "not", "set", "2.27"]


@pytest.mark.heavy
def test_two_programs_are_called_so(tmp_path):
    def of(*command):
        record = run_record(2)
        record.command = list(command)
        record.config = None
        return record

    a = run_of(tmp_path / "a", run=of("old/train.py", "--lr", "1"))
    same = comparison(a, run_of(tmp_path / "b", run=of("new/train.py", "--lr", "2")))
    assert "two programs" not in same.headline
    assert ("run", "command") in [(one.group, one.name) for one in same.differences]
    other = comparison(a, run_of(tmp_path / "c", run=of("-m", "bench.step")))
    assert other.headline.endswith("(two programs: train.py and bench.step)")
    assert any("what differs between them is not one change" in note for note in other.notes)


@pytest.mark.heavy
def test_other_numbers_of_ranks_are_a_difference(tmp_path):
    found = comparison(run_of(tmp_path / "a"), run_of(tmp_path / "b", world_size=4))
    assert found.differences[0].name == "ranks"
    assert (found.differences[0].reference, found.differences[0].candidate) == ("2", "4")
    assert found.headline.endswith(" (other ranks: 4, not 2)")


@pytest.mark.heavy
def test_steps_of_unlike_batches_are_called_so_and_their_samples_are_compared(tmp_path):
    def of(name, samples):
        ddp = {"wrappers": [{"kind": "DistributedDataParallel"}]}
        run = replace(run_record(2), samples_per_step=samples, program=ddp)
        return run_of(tmp_path / name, run=run, change=lambda record: replace(record, tokens=None))

    a = of("a", 32)
    found = comparison(a, of("b", 64))
    assert found.headline.endswith(" (other batches: 64 samples a rank, not 32)")
    assert any("a does 6,400 samples/s, b 12,800" in note for note in found.notes)
    assert "other batches" not in comparison(a, of("c", 32)).headline


@pytest.mark.parametrize(("name", "differ"), [("NVIDIA H200", False), ("NVIDIA H100", True)])
def test_devices_differ_by_name_not_by_number(tmp_path, name, differ):
    def ran_on(num, name):
        return replace(run_record(num), devices=[{"name": name}] * num)

    four = run_of(tmp_path / "a", world_size=4, run=ran_on(4, "NVIDIA H200"))
    found = comparison(four, run_of(tmp_path / "b", world_size=1, run=ran_on(1, name)))
    assert any("the devices differ" in note for note in found.notes) == differ


# ---- outputs -----------------------------------------------------------------------------------


@pytest.mark.heavy
def test_summary_keeps_the_documented_layout(tmp_path):
    a, b = noisy_run(tmp_path / "a", 20), noisy_run(tmp_path / "b", 20, seed=1)
    write_report([a, b], ["a", "b"], tmp_path / "out", outputs=SUMMARY_ALONE)
    content = json.loads((tmp_path / "out" / "summary.json").read_text())
    row = content["comparison"]["step_ms"]
    assert list(row)[:5] == ["reference", "candidate", "ratio", "interval", "verdict"]
    assert row["reference"] == content["datasets"]["a"]["steps"]["step_ms"]["median"]
    low, high = row["interval"]
    assert low < row["ratio"] < high
    parts = content["decomposition"]["parts"]
    assert sum(part["difference_ms"] for part in parts.values()) == pytest.approx(
        content["decomposition"]["step"]["difference_ms"]
    )
    assert content["scope"].startswith("one run on each side")


@pytest.mark.heavy
@pytest.mark.parametrize("is_described", [True, False], ids=["described", "without-run.json"])
def test_a_configuration_is_the_same_where_it_is_known(tmp_path, is_described):
    a, b = noisy_run(tmp_path / "a", 20), noisy_run(tmp_path / "b", 20, seed=1)
    if not is_described:
        (b / "run.json").unlink()
    written = write_report([a, b], ["a", "b"], tmp_path / "out", outputs=SUMMARY_ALONE)
    assert ("same configuration" in written.text) == is_described
    assert ("No recorded setting" in page(written.report)) == is_described


@pytest.mark.heavy
def test_the_same_report_twice(tmp_path):
    a, b = detailed_run(tmp_path / "a"), detailed_run(tmp_path / "b", seed=1)
    for name in ("x", "y"):
        write_report([a, b], ["a", "b"], tmp_path / name, outputs=SUMMARY_ALONE)
    assert (tmp_path / "x/summary.json").read_bytes() == (tmp_path / "y/summary.json").read_bytes()


@pytest.mark.heavy
def test_the_terminal_answers_first(tmp_path):
    a, b = detailed_run(tmp_path / "a"), detailed_run(tmp_path / "b", slowdown=1.05, seed=1)
    text = write_report([a, b], ["a", "b"], tmp_path / "out", outputs=SUMMARY_ALONE).text
    assert len(text.splitlines()) <= 35
    assert any(line.startswith("step, the sum") for line in text.splitlines())
    outputs = dataclasses.replace(SUMMARY_ALONE, long=True)
    long = write_report([a, b], ["a", "b"], tmp_path / "out", outputs=outputs).text
    assert long.splitlines()[0] == text.splitlines()[0]
    lines = long.splitlines()
    assert lines[0].startswith("b is slower than a: step time +")
    assert lines[0].endswith(", all of it compute (+1.74 ms)")
    step = next(line for line in lines if line.startswith("step ") and "worse" in line)
    assert step.split()[-1] == "worse"
    assert any(line.startswith("all_gather busbw") for line in lines)
    assert any(line.startswith("step, the sum") for line in lines)
    assert all(len(line) < 175 for line in lines)


# ---- size ----------------------------------------------------------------------------------------

RSS = """
import resource, sys
from aorta.page.write import make_report
make_report([sys.argv[1]], ["x"])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
"""


def test_ranks_are_not_held(tmp_path):
    """96 ranks whose files hold 60 MB: kept are a few numbers a step."""
    rows = records_of(num_steps=40, num_ranks=1, num_collectives=60)[0]
    folder = tmp_path / "run"
    folder.mkdir()
    size = 0
    for rank in range(96):
        lines = b"".join(
            msgspec.json.encode(msgspec.structs.replace(row, rank=rank, world_size=96)) + b"\n"
            for row in rows
        )
        size += (folder / f"rank_{rank}_metrics.jsonl").write_bytes(lines)
    assert size > 50e6
    small = tmp_path / "small"
    small.mkdir()
    lines = b"".join(msgspec.json.encode(msgspec.structs.replace(row, world_size=1)) + b"\n" for row in rows)
    (small / "rank_0_metrics.jsonl").write_bytes(lines)
    used_mib = [
        int(
            subprocess.run(
                [sys.executable, "-c", RSS, str(one)], capture_output=True, text=True, check=True,
                cwd=Path(__file__).parents[3],
            ).stdout
        )
        for one in (small, folder)
    ]  # fmt: skip
    assert used_mib[1] - used_mib[0] < 20


@pytest.mark.heavy
def test_jobs_give_the_same(tmp_path):
    folder = detailed_run(tmp_path / "run")
    one, two = (make_report([folder], ["x"], jobs=jobs).summary for jobs in (1, 2))
    assert msgspec.json.encode(one) == msgspec.json.encode(two)


@pytest.mark.heavy
def test_an_error_of_another_process_is_one_line(tmp_path):
    folder = detailed_run(tmp_path / "run")
    (folder / "rank_1_metrics.jsonl").write_text("{}\n")
    with pytest.raises(AortaError, match="not a step record"):
        make_report([folder], ["x"], jobs=2)


def test_a_scheduler_that_is_not_there_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr("aorta.processes.SCHEDULER_TIMEOUT_S", 1)
    folder = detailed_run(tmp_path / "run")
    with pytest.raises(AortaError, match="dask"):
        make_report([folder], ["x"], dask="tcp://127.0.0.1:9")


@pytest.mark.heavy
def test_progress_is_told(tmp_path):
    folder = detailed_run(tmp_path / "run")
    told = []
    make_report([folder], ["x"], progress=lambda *one: told.append(one))
    assert told == [("x", 1, 2), ("x", 2, 2)]


def settling_run(folder, num_steps, seed=0):
    """3 % above its level at first, settling over 30 steps."""
    rng = random.Random(seed)
    steps = []
    for step in range(num_steps):
        slow = 1 + 0.03 * math.exp(-step / 30) + rng.gauss(0, 0.004)
        steps += [step_record(step_timeline(8.0 * slow, rank=r, step=step), 2) for r in (0, 1)]
    return write_run(folder, steps, run_record(2))


@pytest.mark.heavy
def test_runs_of_unlike_length_that_settle_are_not_told_apart(tmp_path):
    found = comparison(settling_run(tmp_path / "a", 300), settling_run(tmp_path / "b", 40, seed=1))
    assert found.metrics["step_ms"].verdict in ("same", "cannot tell")
    assert any("the ratio is of the steps that both have" in note for note in found.notes)


@pytest.mark.heavy
def test_a_difference_that_matters_less_is_the_same(tmp_path):
    """3 runs a side without spread: +1 % is told, and is less than 3 %, and more than 0.5 %."""
    folders = [noisy_run(tmp_path / f"a{i}", 60, seed=i) for i in (0, 2, 4)]
    folders += [noisy_run(tmp_path / f"b{i}", 60, slowdown=1.02, seed=i) for i in (1, 3, 5)]
    step = make_report(folders, list("aaabbb")).comparison.metrics["step_ms"]
    assert step.verdict == "same"
    assert 1.0 < step.interval.low < step.interval.high < 1.03
    step = make_report(folders, list("aaabbb"), matters=0.005).comparison.metrics["step_ms"]
    assert step.verdict == "worse"


def curriculum_run(folder, seed, slowdown=1.0, order=1):
    """Steps of 8, 12, 16 and 24 ms, as sequences grow; order -1: from long to short."""
    rng = random.Random(seed)
    steps = []
    for step in range(48):
        size = (8.0, 12.0, 16.0, 24.0)[::order][step // 12]
        steps.append(step_record(step_timeline(size * slowdown * rng.gauss(1, 0.005), step=step), 1))
    return write_run(folder, steps, run_record(1))


@pytest.mark.heavy
def test_what_both_runs_do_in_a_step_cancels(tmp_path):
    a = curriculum_run(tmp_path / "a", 0)
    same = comparison(a, curriculum_run(tmp_path / "b", 1), warmup=0)
    assert same.metrics["step_ms"].verdict == "same"
    assert any("their times rise and fall together (correlation 1.00)" in note for note in same.notes)
    slower = comparison(a, curriculum_run(tmp_path / "c", 2, slowdown=1.05), warmup=0)
    assert slower.metrics["step_ms"].verdict == "worse"
    turned = comparison(a, curriculum_run(tmp_path / "d", 2, order=-1), warmup=0)
    assert turned.metrics["step_ms"].verdict == "cannot tell"
    assert "a side would be needed" in turned.headline


@pytest.mark.heavy
def test_nothing_is_printed_that_cannot_be(tmp_path):
    """Steps that differ by three orders of magnitude: no interval reaches below 0, and one that says
    nothing is left out."""
    rng = random.Random(0)
    folders = []
    for name in "ab":
        steps = [step_record(step_timeline(8.0 * 10 ** rng.uniform(0, 3), step=i), 1) for i in range(12)]
        folders.append(write_run(tmp_path / name, steps, run_record(1)))
    found = comparison(*folders, warmup=0)
    assert found.metrics["step_ms"].verdict == "cannot tell"
    for one in found.metrics.values():
        assert one.interval is None or 0 < one.interval.low <= one.interval.high < 100 * one.interval.low


# ---- like with like: what happens in some steps ---------------------------------------------------


def run_with_checkpoints(folder, phase, every=10, cost=60.0, slowdown=1.0, seed=0):
    """100 steps of about 10 ms; one in `every` saves a checkpoint, which makes it `cost` ms longer."""
    rng, records = np.random.default_rng(seed), []
    for step in range(100):
        compute = 8.0 * slowdown * rng.normal(1, 0.004)
        is_saving = step % every == phase
        line = step_timeline(step=step, compute=compute, idle=1.0 + cost * is_saving)
        spans = [HostSpan(kind="checkpoint", start_ms=1.0, end_ms=1.0 + cost)] if is_saving else []
        records.append(step_record(line, 1, host_spans=spans))
    return write_run(folder, records, run_record(1))


@pytest.mark.heavy
def test_a_checkpoint_on_one_side_alone_is_compared_with_no_step(tmp_path):
    """20 of the 100 steps have one on either side; they took 60 of every 160 ms on both."""
    a = run_with_checkpoints(tmp_path / "a", 3)
    b = run_with_checkpoints(tmp_path / "b", 7, slowdown=1.1, seed=1)
    found = comparison(a, b)
    step = found.metrics["step_ms"]
    assert step.verdict == "worse"
    assert step.ratio == pytest.approx(10.8 / 10.0, abs=0.01)
    (note,) = [note for note in found.notes if "are left out" in note]
    assert "20 in which a checkpoint was saved (a 3" in note


@pytest.mark.heavy
def test_where_most_steps_differ_none_is_left_out(tmp_path):
    a = run_with_checkpoints(tmp_path / "a", 0, every=2, cost=3.0)
    b = run_with_checkpoints(tmp_path / "b", 1, every=2, cost=3.0, seed=1)
    assert not [note for note in comparison(a, b).notes if "left out of" in note]


@pytest.mark.heavy
def test_parts_add_up_to_the_ratio_that_is_judged(tmp_path):
    """Not to the medians of unlike steps, 12 and 16 ms and slower by 5 %, nor to their means."""
    a = curriculum_run(tmp_path / "a", 0)
    found = comparison(a, curriculum_run(tmp_path / "b", 2, slowdown=1.05), warmup=0)
    step, apart = found.metrics["step_ms"], found.decomposition
    assert apart.step.reference_ms == step.reference
    assert apart.step.candidate_ms == pytest.approx(step.reference * step.ratio)
    ends = [step.reference * (end - 1) for end in (step.interval.low, step.interval.high)]
    assert [apart.step.interval.low, apart.step.interval.high] == pytest.approx(ends, rel=1e-3)
    assert sum(part.difference_ms for part in apart.parts) == pytest.approx(apart.step.difference_ms)


@pytest.mark.parametrize(
    ("low", "words"),
    [(-0.1, ""), (0.1, ", most of it compute (+3.00 of +4.00 ms), most in forward (a.py:3)")],
)
def test_no_part_is_named_that_may_not_have_moved(low, words):
    """Nor where the ratio went the other way."""
    part = Part("compute", 10.0, 13.0, 3.0, ConfidenceInterval(low, 6.0))
    phases = [PhaseChange("forward", part, "a.py:3")]
    parts = Decomposition(Part("step", 10.0, 14.0, 4.0, None), [part], "", [], phases=phases)
    assert _mostly(parts, is_slower=True) == words
    assert _mostly(parts, is_slower=False) == ""


# ---- a verdict in each state -------------------------------------------------------------------------------


def state_note(*folders):
    found = comparison(*folders, warmup=0)
    return next((note for note in found.notes if "hangs on the state" in note), "")


@pytest.mark.heavy
def test_a_save_that_takes_longer_is_told_though_the_typical_step_is_the_same(tmp_path):
    """Steps of 10 ms, each tenth with a save of 60 ms, then of 100 ms: 110 over 70."""
    a = run_with_checkpoints(tmp_path / "a", 3)
    b = run_with_checkpoints(tmp_path / "b", 3, cost=100.0, seed=1)
    note = state_note(a, b)
    assert "a checkpoint was saved (10 steps): in these runs, +57" in note
    assert re.search(r"other steps \(90 steps\): (the same|cannot tell), [-+]?0\.\d", note)
    assert state_note(a, run_with_checkpoints(tmp_path / "c", 3, seed=2)) == ""


def run_of_sizes(folder, slow_from=math.inf, seed=0):
    """100 steps of 1000, 2000 or 4000 tokens, which take 10, 20 or 40 ms; from a size on 10 % longer."""
    rng, records = np.random.default_rng(seed), []
    for step in range(100):
        size = (1000, 2000, 4000)[step % 3]
        compute = size / 100 * rng.normal(1, 0.004) * (1.1 if size >= slow_from else 1.0) - 2.0
        line = step_timeline(step=step, compute=compute)
        records.append(step_record(line, 1, tokens=size))
    return write_run(folder, records, run_record(1))


@pytest.mark.heavy
def test_what_is_slow_for_long_sequences_alone_is_told(tmp_path):
    a, b = run_of_sizes(tmp_path / "a"), run_of_sizes(tmp_path / "b", slow_from=4000, seed=1)
    note = state_note(a, b)
    assert "4,000 tokens (33 steps): slower, +9." in note
    assert re.search(r"1,000 tokens \(34 steps\): (the same|cannot tell), [-+]?0\.\d", note)


def run_with_clocks(folder, share, slowdown=1.0, seed=0):
    """100 steps; in a share of them the clock is 20 % lower, and the step as much longer."""
    rng, records = np.random.default_rng(seed), []
    for step in range(100):
        is_low = step >= 100 * (1 - share)
        compute = 8.0 * slowdown * rng.normal(1, 0.004) * (1.25 if is_low else 1.0)
        device = DeviceRecord(sample_unix_ns=step, sm_clock_mhz=1400.0 if is_low else 1750.0)
        records.append(step_record(step_timeline(step=step, compute=compute), 1, device=device))
    return write_run(folder, records, run_record(1))


@pytest.mark.heavy
def test_a_clock_that_was_low_for_longer_is_told_from_a_slower_program(tmp_path):
    a = run_with_clocks(tmp_path / "a", 0.2)
    note = state_note(a, run_with_clocks(tmp_path / "b", 0.8, seed=1))
    assert re.search(r"a low clock \(20 and 80 steps\): (the same|cannot tell), [-+]?0\.\d", note)
    assert re.search(r"other steps \(80 and 20 steps\): (the same|cannot tell), [-+]?0\.\d", note)
    assert state_note(a, run_with_clocks(tmp_path / "c", 0.2, slowdown=1.1, seed=1)) == ""


def test_a_part_cannot_lose_more_than_it_takes():
    """20 ms of a step that may be ten times as long or short on the other side."""
    part = Change(20.0, 0.0, 1.0).part("compute", [Share(1.0, 0.01), Share(1.0, 0.01)])
    assert part.interval.low == -20.0
    assert part.interval.high > 20.0
