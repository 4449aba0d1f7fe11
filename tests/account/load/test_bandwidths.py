"""A bandwidth is over the transfer or over the whole duration: one of them in a run, and like with like."""

import random

import numpy as np
import pytest

from aorta.account.judge.gate import Limit, check_budget
from aorta.account.load.open import load_run
from aorta.page.write import make_report
from tests.account.load.late_ranks import SIZE, step_of
from tests.records.run_folders import run_record, write_run

NAME = "busbw_gb_s.all_gather"
OVER_2_MS, OVER_5_MS = SIZE / 2e6 / 2, SIZE / 5e6 / 2


def run_of(folder, jitter_ms=0.0, noise_ms=0.0, num_steps=20):
    """Rank 0 gathers for 5 ms, 3 of which it waits for rank 1. jitter_ms: of rank 1's clock, step by step,
    so that nobody can tell who came when. noise_ms: of the time at which both end."""
    rng = random.Random(0)
    steps = []
    for i in range(num_steps):
        offset_ms = rng.uniform(-jitter_ms, jitter_ms)
        end_ms = rng.gauss(10, noise_ms)
        steps += [step_of(0, i, 5, end_ms), step_of(1, i, 8, end_ms, offset_ms=offset_ms)]
    return write_run(folder, steps, run_record(2))


@pytest.fixture
def matched(tmp_path):
    return run_of(tmp_path / "matched")


@pytest.fixture
def unmatched(tmp_path):
    return run_of(tmp_path / "unmatched", jitter_ms=9.0)


def ratio_gate(report):
    return check_budget([Limit(NAME, "min_ratio", 0.9), Limit(NAME, "max_ratio", 1.1)], report)


@pytest.mark.heavy
@pytest.mark.parametrize("labels", ["ab", "ba"])
def test_the_transfer_of_one_side_is_not_judged_against_the_duration_of_the_other(matched, unmatched, labels):
    report = make_report([matched, unmatched], list(labels), reference="a")
    found = report.comparison.metrics[NAME]
    shown = sorted([found.reference, found.candidate])
    assert shown == pytest.approx([(OVER_5_MS + OVER_2_MS) / 2, OVER_2_MS])
    assert (found.verdict, found.ratio) == ("not judged", None)
    m, u = labels
    said = f"not the same thing on both sides: that of {m} is over the transfer, that of {u} over the whole"
    assert found.reason.startswith(said)
    assert [one.state for one in ratio_gate(report).checked] == ["not judged"] * 2


@pytest.mark.heavy
def test_the_view_of_a_rank_is_said_to_be_that_of_what_is_so(tmp_path):
    """A duration always is; a bandwidth is where neither side has it over the transfer."""
    a, b = (run_of(tmp_path / name, jitter_ms, 0.1) for name, jitter_ms in (("a", 0.0), ("b", 9.0)))
    notes = " ".join(make_report([a, b], ["a", "b"]).comparison.notes)
    assert "collective times are as each rank saw them" in notes
    notes = " ".join(make_report([b, b], ["b", "c"]).comparison.notes)
    assert "collective times and busbw are as each rank saw them" in notes


@pytest.mark.heavy
@pytest.mark.parametrize("jitter_ms", [0.0, 9.0])
def test_bandwidths_of_one_kind_are_compared(tmp_path, jitter_ms):
    report = make_report([run_of(tmp_path / name, jitter_ms) for name in "ab"], ["a", "b"])
    assert report.comparison.metrics[NAME].verdict in ("same", "cannot tell")
    assert ratio_gate(report).state == "met"


def test_a_label_whose_runs_differ_in_it_has_no_bandwidth(matched, unmatched):
    report = make_report([matched, unmatched], ["a", "a"])
    why = "not the same thing in all of its runs: ranks were matched in some of them only"
    assert report.datasets["a"].statistics[NAME].median is None
    assert report.summary["datasets"]["a"]["not_measured"][NAME] == why
    (checked,) = check_budget([Limit(NAME, "min", 1e-6)], report).checked
    assert (checked.state, checked.reason) == ("not judged", f"not measured: {why}")


@pytest.mark.heavy
def test_an_absolute_limit_says_what_the_bandwidth_is_over(matched, unmatched):
    for folder, over in ((matched, "over the transfer"), (unmatched, "over the duration")):
        (checked,) = check_budget([Limit(NAME, "min", 1e-6)], make_report([folder], ["a"])).checked
        assert checked.text.endswith(f", {over}")


def with_lost_steps(folder, lost):
    """Rank 1 calls its gather of these steps by another number: nobody can match them."""
    steps = [
        step_of(r, i, (5, 8)[r], 10, seq=99 + i if r and i in lost else i) for i in range(12) for r in (0, 1)
    ]
    return load_run(write_run(folder, steps, run_record(2)), "a").metrics[NAME]


def test_steps_whose_transfer_is_not_known_have_no_bandwidth_beside_those_that_have(tmp_path):
    busbw = with_lost_steps(tmp_path / "run", lost=[3])
    known = [i for i in range(12) if i != 3]
    assert busbw[:, known].ravel().tolist() == pytest.approx([OVER_2_MS] * 22)
    assert np.isnan(busbw[:, 3]).all()


def test_where_few_steps_have_a_transfer_all_bandwidths_are_over_the_duration(tmp_path):
    busbw = with_lost_steps(tmp_path / "run", lost=range(7))
    assert busbw[0].tolist() == pytest.approx([OVER_5_MS] * 12)
    assert busbw[1].tolist() == pytest.approx([OVER_2_MS] * 12)
