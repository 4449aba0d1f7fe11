"""A run in which times were taken in one step of four (--overhead)."""

import msgspec
import numpy as np
import pytest

from aorta.account.judge.answer import dataset_answer
from aorta.account.judge.cells import account_of
from aorta.account.judge.gate import check_budget, load_budget
from aorta.account.judge.judged import dataset, judge, usual_step
from aorta.account.judge.profiles import told_steps
from aorta.account.judge.timed_steps import remarks
from aorta.account.load.open import load_run
from aorta.account.load.rank.phases import PREFIX, STEP
from aorta.page.distributions import distribution_data
from aorta.page.html import page
from aorta.page.table import dataset_table
from aorta.page.write import make_report
from aorta.records.schema import CollectiveRecord
from aorta.why.causes.finding import CauseFinding
from aorta.why.causes.rank import found_causes
from aorta.why.causes.text import fact_texts, nothing_text, title
from tests.account.sparse_runs import row_of, sparse_run
from tests.records.run_folders import sealed_again


def call(op, timed):
    """As a step's record holds it; without times no stream is noted either."""
    start_ms, end_ms, stream = (1.0, 3.0, "alltoall") if timed else (None, None, "")
    return CollectiveRecord(
        op=op, stream=stream, group="ep", ranks=[0, 1], bytes=1000, dtype="bfloat16", seq=0,
        start_ms=start_ms, end_ms=end_ms, algbw_gb_s=None, busbw_gb_s=None,
    )  # fmt: skip


def alone(folder):
    return make_report([folder], ["a"], warmup=0).datasets["a"]


def test_the_table_says_once_how_many_steps_its_overlap_is_of(tmp_path):
    timed = dataset("a", [judge(load_run(sparse_run(tmp_path), "a"), num_warmup=0)])
    text = dataset_table(timed)
    assert "only 8 of 32 judged steps were recorded (--overhead): compute, comm" in text
    assert text.count("8 of") == 1
    assert timed.statistics["step_ms"].median == 10.0  # of all 32
    assert timed.statistics["comm_ms"].median == 4.5


def test_timed_steps_whose_overlap_is_not_known_are_said_besides(tmp_path):
    """Steps 4 and 8 have compute, and a collective without times on rank 0."""
    folder = sparse_run(tmp_path)
    path = folder / "rank_0_metrics.jsonl"
    lines = path.read_bytes().splitlines()
    for step in (4, 8):
        record = msgspec.json.decode(lines[step])
        record["overlap"] |= dict.fromkeys(("comm_ms", "hidden_ms", "exposed_ms", "idle_ms"))
        lines[step] = msgspec.json.encode(record)
    path.write_bytes(sealed_again(b"\n".join(lines)))
    text = dataset_table(alone(folder))
    assert "only 8 of 32 judged steps were recorded" in text
    assert "comm and overlap are known for 6 of these 8 steps that were timed; in the others" in text


def test_collectives_are_counted_where_they_were_not_timed(tmp_path):
    """An all-to-all in steps 0, 1, 4 and 5, of which 0 and 4 are timed; step 7 keeps no list of them."""

    def calls(step, timed):
        return None if step == 7 else [call("all_to_all", timed)] if step % 4 < 2 else []

    run = load_run(sparse_run(tmp_path, num_steps=8, calls=calls), "a")
    nan = np.nan
    for name, values in {
        "count": [1, 1, 0, 0, 1, 1, 0, nan],
        "bytes": [1000, 1000, 0, 0, 1000, 1000, 0, nan],
        "duration_ms": [2, nan, nan, nan, 2, nan, nan, nan],
    }.items():
        np.testing.assert_allclose(run.metrics[f"{name}.all_to_all"], [values] * 2)


def test_the_mean_of_timed_steps_stands_beside_that_of_the_others(tmp_path):
    """Timing costs: a share of the step is told by steps that may take longer than most. The host, which
    times the others, runs ahead and then waits: their mean is true, their median is not."""
    waits = lambda step: 2.0 if step % 8 < 6 else 26.0  # noqa: E731
    assert remarks(alone(sparse_run(tmp_path, untimed_ms=waits))) == [
        "only 8 of 32 judged steps were recorded (--overhead): compute, communication and all numbers"
        " derived from them come from these steps; the recorded ones take 10.0 ms on average, the others"
        " 10.0 ms"
    ]


def test_a_run_without_any_times_has_no_overlap(tmp_path):
    sparse_run(tmp_path / "a", num_steps=3, every=4)  # step 0 was timed
    late = make_report([tmp_path / "a"], ["a"], warmup=1).datasets["a"]
    assert remarks(late) == []
    assert nothing_text(late, found_causes(late.first)).startswith("No cause is named.")
    assert dataset_answer(late) == "a: a step takes 10.0 ms; overlap was not measured"


# ---- two of them, and what the page says --------------------------------------------------------


def pair(tmp_path, **changes):
    """64 judged steps each, 16 of them timed; exposed goes from 1 to 2 ms of 10."""
    a = sparse_run(tmp_path / "a", num_steps=64, noise=0.01, **changes)
    b = sparse_run(tmp_path / "b", exposed=2.0, num_steps=64, noise=0.01, **changes)
    return make_report([a, b], ["a", "b"], warmup=0)


@pytest.mark.heavy
def test_two_such_runs_are_judged_by_their_timed_steps(tmp_path):
    found = pair(tmp_path).comparison
    assert found.metrics["exposed_ms"].verdict == "worse"
    assert found.metrics["comm_ms"].verdict in ("same", "cannot tell")
    parts = {part.name: part.difference_ms for part in found.decomposition.parts}
    assert parts["communication"] == pytest.approx(1.0, abs=0.05)
    for side in "ab":
        assert any(
            note.startswith(f"{side}: only 16 of 64 judged steps were recorded") for note in found.notes
        )


@pytest.mark.heavy
def test_a_limit_is_judged_by_the_timed_steps(tmp_path):
    (tmp_path / "budget.yaml").write_text("exposed_ms: {max: 1.5}\n")
    gate = check_budget(load_budget(tmp_path / "budget.yaml"), pair(tmp_path))
    assert [one.state for one in gate.checked] == ["violated"]


@pytest.mark.heavy
def test_the_step_is_that_of_all_steps_and_its_shares_those_of_the_timed_ones(tmp_path):
    """2 ms of 10: the others take 5 ms, of which 2 would be 40 %."""
    folder = sparse_run(tmp_path, exposed=2.0, untimed_ms=5.0)
    found = alone(folder)
    assert dataset_answer(found).startswith("a: a step takes 5.00 ms; 20 % of it is exposed")
    text = dataset_table(found)
    assert row_of(text, "step").split()[1] == "5.00"
    assert "median 5.00" in row_of(text, "step")  # of the steps that the row is of
    assert "the others 5.00 ms" in text
    assert row_of(text, "communication").split()[3:5] == ["20", "%"]
    said = page(make_report([folder], ["a"], warmup=0))
    assert "Means over the judged steps that were timed; each" in said
    assert ">20 %<" in said


@pytest.mark.heavy
def test_every_other_step_of_a_long_run_holds_timed_ones(tmp_path):
    """Steps 3, 7, ... of a run that begins at step 1 lie in rows that every second row leaves out."""
    folder = sparse_run(tmp_path, num_steps=801)
    for rank in (0, 1):
        path = folder / f"rank_{rank}_metrics.jsonl"
        path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[1:]))
    (run,) = distribution_data(make_report([folder], ["a"], warmup=0))["runs"]
    values = run["values"]["comm_ms"][0]
    assert len(values) <= 500
    assert sum(value is not None for value in values) == pytest.approx(len(values) / 4, abs=1)


def test_steps_that_were_timed_are_no_warm_up_of_those_that_were_not(tmp_path):
    """Timing costs 2 ms of 32 in the first 24 of 80 steps, and then nothing is timed: 23 are judged."""
    run = load_run(sparse_run(tmp_path, num_steps=80), "a")
    timed = np.arange(80) < 24
    run.metrics["step_ms"][:] = np.where(timed, 32.0, 30.0) + 0.1 * np.sin(np.arange(80))
    run.metrics["step_ms"][:, 0] = 300.0
    for name in ("compute_ms", "comm_ms", "exposed_ms"):
        run.metrics[name][:] = np.where(timed, 10.0, np.nan)
    judged = judge(msgspec.structs.replace(run, left_out=~timed))
    assert (judged.num_warmup, judged.num_judged) == (1, 79)
    assert int(np.isfinite(judged.values("compute_ms")).all(axis=0).sum()) == 23


def test_sampled_lines_are_told_of_the_account_s_steps(tmp_path):
    """One of 8 takes fifty times as long and has no parts: a line of the others would else exceed them."""
    run = load_run(sparse_run(tmp_path, num_steps=80), "a")
    timed = np.arange(80) % 8 > 0
    run.metrics["step_ms"][:] = np.where(timed, 30.0, 1500.0)
    for name in ("compute_ms", "comm_ms", "exposed_ms"):
        run.metrics[name][:] = np.where(timed, 10.0, np.nan)
    judged = judge(msgspec.structs.replace(run, left_out=~timed))
    assert told_steps(judged).tolist() == timed[judged.judged_steps].tolist()


@pytest.mark.parametrize(
    ("untimed_ms", "takes", "told"),
    [
        pytest.param(
            30.0, "30.0 ms (median of all", "10.0 ms, and the rest of the 30.0 ms is not known", id="longer"
        ),
        # Of three in four that are left out: 7, 8 and 9. With those of 10 the median would be 8.5.
        pytest.param(
            lambda step: 6.0 + step % 4,
            "8.00 ms (median of 24 of",
            "10.0 ms, and shortened to add up to 8.00 ms",
            id="shorter",
        ),
        pytest.param(10.1, "10.1 ms (median of all", "", id="alike"),
        # Of three in four that are left out, one in three takes 30: (8 * 10 + 16 * 10 + 8 * 30) / 32.
        pytest.param(
            lambda step: 30.0 if step % 4 == 1 else 10.0,
            "15.0 ms (mean of all",
            "10.0 ms, and the rest of the 15.0 ms is not known",
            id="kinds",
        ),
    ],
)
def test_the_title_has_the_usual_step_and_what_the_recorded_ones_took_where_that_differs(
    tmp_path, untimed_ms, takes, told
):
    text = title(alone(sparse_run(tmp_path, untimed_ms=untimed_ms)))
    without = "" if "of all" in takes else ", without the recorded ones"
    assert f"a step takes {takes} 32 judged steps{without}, 2 ranks" in text
    assert text.partition("; its parts were measured in 8 recorded steps of ")[2] == told


def test_early_recorded_steps_are_no_usual_ones_either(tmp_path):
    """16 of 100 ms at the start and 8 of 60 later, beside 36 of 55 that were not recorded."""
    run = load_run(sparse_run(tmp_path, num_steps=60), "a")
    step = np.arange(60)
    timed = (step < 16) | ((step % 5 == 1) & (step < 56))
    run.metrics["step_ms"][:] = np.where(step < 16, 100.0, np.where(timed, 60.0, 55.0))
    for name in ("compute_ms", "comm_ms", "exposed_ms"):
        run.metrics[name][:] = np.where(timed, 10.0, np.nan)
    usual = usual_step(judge(msgspec.structs.replace(run, left_out=~timed)))
    assert (usual.ms, usual.is_of_left_out, len(usual.global_step)) == (55.0, True, 36)


def test_of_the_rest_of_a_longer_usual_step_the_phases_are_known_where_the_host_has_them(tmp_path):
    first = alone(sparse_run(tmp_path, untimed_ms=30.0)).first
    step_ms = first.metrics["step_ms"]
    phases = {STEP: step_ms, f"{PREFIX}forward": step_ms / 2}
    told = title(dataset("a", [msgspec.structs.replace(first, host_parts={**first.host_parts, **phases})]))
    assert told.endswith("of 10.0 ms, and of the rest of the 30.0 ms only the host's phases are known")


@pytest.mark.parametrize(
    ("untimed_ms", "step", "tables"),
    [
        pytest.param(30.0, "10.0 ms recorded", True, id="longer"),
        pytest.param(9.2, "9.20 ms", True, id="shorter"),
        pytest.param(10.1, "10.1 ms", False, id="alike"),
    ],
)
def test_of_which_steps_numbers_are_that_stand_beside_a_step(tmp_path, untimed_ms, step, tables):
    """Parts are brought to a shorter usual step, and left as they were beside a longer one; tables of
    operations and kernels always are."""
    first = alone(sparse_run(tmp_path, untimed_ms=untimed_ms)).first
    for facts in ({}, {"step_ms": account_of(first).mean_step_ms}):
        finding = CauseFinding("idle", np.full(8, 1.0), {("idle",): 1.0}, facts=facts)
        assert fact_texts(finding, first, account_of(first), "run")["step_ms"] == step
    told = "Operations and kernels are of 8 recorded steps of 10.0 ms, as they were." if tables else ""
    assert account_of(first).recorded_text == told


def test_cells_of_recorded_steps_are_made_as_long_as_the_usual_one(tmp_path):
    """10 ms of a recorded step against 9.2: all give alike, since events do not know kernels from gaps."""
    made = alone(sparse_run(tmp_path, exposed=2.0, untimed_ms=9.2))
    account = account_of(made.first)
    assert account.mean_ms("communication") == pytest.approx(0.92 * 2.0)
    assert sum(row.mean_ms for row in account.rows()) == pytest.approx(9.2)
    assert account.recorded_ms == pytest.approx(10.0)


def test_a_host_that_runs_ahead_again_is_short_in_steps_that_are_not(tmp_path):
    """8 of 32 take it 1 ms: their mean would be 7.75."""
    made = alone(sparse_run(tmp_path, untimed_ms=10.0))
    made.first.metrics["step_ms"][:, np.flatnonzero(made.first.left_out)[:8]] = 1.0
    assert "a step takes 10.0 ms (median of all 32 judged steps, 2 ranks" in title(made)
