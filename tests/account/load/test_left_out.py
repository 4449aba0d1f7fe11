"""Steps that the overhead left out: where a process is alone, all of a CPU's step is known of them."""

import numpy as np
import pytest

from aorta.account.judge.cells import account_of
from aorta.account.judge.judged import dataset, judge
from aorta.account.judge.timed_steps import remarks
from aorta.account.load.open import load_run
from aorta.page.table import dataset_table
from aorta.records.schema import HostUse, OverheadRecord
from aorta.steps.notes import LEFT_OUT as BY_OVERHEAD
from aorta.timeline.types import OverlapRecord
from aorta.why.causes.rank import found_causes
from aorta.why.causes.text import title
from tests.records.run_folders import run_record
from tests.why.causes.runs import Host, run_of

FIRST, LEFT_OUT = (
    24,
    {"overlap": OverlapRecord(), "is_recorded": False, "collectives": None, "active_segments": None},
)


def overhead(low_ms=0.4, high_ms=0.8, always_on=0.04, every=10.0, always_on_ms=None):
    return OverheadRecord(
        limit=0.01, cost=0.005, interval=(0.004, 0.006), step_ms=(low_ms + high_ms) / 2,
        step_interval_ms=(low_ms, high_ms), always_on=always_on, every=every, num_steps=80, num_recorded=24,
        always_on_ms=always_on_ms,
    )  # fmt: skip


def alone(folder, steps, **told):
    """A loop that computes 0.6 ms and reads 0.3; recorded steps take twice as long, as if the host slept."""

    def make(rank, step, noise):
        host = Host().work(0.3, "data").work(0.6 * noise.gauss(1, 0.01)).after(0.1)
        if step >= FIRST:
            return host, {"host_use": HostUse(host.at, 0.0), "world_size": 1, **LEFT_OUT}
        recorded = Host().work(0.6, "data").work(0.6).idle(0.7).after(0.1)
        return recorded, {"host_use": HostUse(1.3, 0.0), "world_size": 1}

    return judge(
        load_run(run_of(folder, make, run_record(1, overhead=overhead(**told)), steps, width=1), "a")
    )


def test_the_account_of_a_process_that_is_alone_is_of_the_steps_that_recording_does_not_touch(tmp_path):
    judged = alone(tmp_path / "run", steps=80)
    account = account_of(judged)
    assert account.step_ms.shape[1] == 80 - FIRST
    assert account.mean_step_ms == pytest.approx(1.0, rel=0.01)
    # 4 % of the step is aorta's own code, which runs behind the body first.
    expected = {"data": 0.3, "between_steps": 0.06, "instrument": 0.04, "compute": 0.6}
    found = {name: ms.mean() for name, ms in account.cells.items() if ms.any()}
    assert found == pytest.approx(expected, rel=0.02)
    assert not [cause for cause in found_causes(judged).listed if cause.kind == "pause"]


@pytest.mark.parametrize(("width", "is_told"), [(1, False), (2, True)])
def test_the_overhead_is_no_reason_for_what_is_known_of_the_steps_it_left_out(tmp_path, width, is_told):
    reasons = {"not_measured": dict.fromkeys(("overlap", "collectives"), BY_OVERHEAD)}

    def make(rank, step, noise):
        left_out = LEFT_OUT | reasons if step >= FIRST else {}
        return Host().work(1.0), {"world_size": width, **left_out}

    run = load_run(run_of(tmp_path / "run", make, run_record(width), steps=40, width=width), "a")
    assert ({"overlap", "collectives"} <= set(run.not_measured)) == is_told


def test_the_instrument_has_what_the_sentence_of_its_cost_says(tmp_path):
    """always_on is a part of the step without aorta, and not of the step that was recorded."""
    account = account_of(alone(tmp_path / "run", 80, always_on=0.04, always_on_ms=0.038))
    assert account.mean_ms("instrument") == pytest.approx(0.038)


def test_one_screen_has_one_count_and_one_statistic(tmp_path):
    judged = alone(tmp_path / "run", steps=80)
    of_run = dataset("a", [judged])
    assert "a step takes 1.00 ms (mean of 56 of 79 judged steps, without the recorded ones, 1 rank" in title(
        of_run
    )
    (text,) = [text for text in remarks(of_run) if "recorded" in text]
    assert text.startswith("23 of 79 judged steps were recorded with their details (--overhead)")
    assert "the recorded ones' median step takes 2.00 ms, the others' 0.999 ms" in text
    step_row = next(line for line in dataset_table(of_run).splitlines() if line.startswith("step "))
    assert "median 0.999, p95 1.01" in step_row


def test_few_steps_that_were_left_out_are_no_account(tmp_path):
    judged = alone(tmp_path / "run", steps=40)
    assert account_of(judged).step_ms.shape[1] == judged.num_judged == 39


def test_what_ranks_exchange_is_not_known_of_steps_that_were_left_out(tmp_path):
    def make(rank, step, noise):
        return Host().work(1.0).comm(0.5), LEFT_OUT if step >= FIRST else {}

    judged = judge(load_run(run_of(tmp_path / "run", make, steps=80), "a"))
    assert account_of(judged).step_ms.shape[1] <= FIRST
    assert np.isnan(judged.values("compute_ms")[:, -1]).all()


@pytest.mark.parametrize(
    ("gap_ms", "is_named"), [((2.0, 6.0), False), ((0.5, 1.0), True), ((-1.0, 6.0), True)]
)
def test_no_cause_lies_within_what_recording_makes_steps_longer(tmp_path, gap_ms, is_named):
    """Both ranks sleep for 5 of 35 ms in steps that are all recorded."""

    def make(rank, step, noise):
        return Host().work(28.0 + noise.gauss(0, 0.1)).idle(5.0).comm(2.0), {"host_use": HostUse(28.0, 0.0)}

    run = run_record(2, overhead=overhead(*gap_ms))
    judged = judge(load_run(run_of(tmp_path / "run", make, run), "a"), 1)
    assert any(cause.kind == "pause" for cause in found_causes(judged).listed) == is_named
    assert account_of(judged).gap_ms == (gap_ms[1] if gap_ms[0] > 0 else 0.0)


def test_a_mended_step_is_promised_without_the_instrument(tmp_path):
    def make(rank, step, noise):
        return Host().work(18.0 + noise.gauss(0, 0.1)).idle(10.0).comm(2.0), {"host_use": HostUse(18.0, 0.0)}

    run = run_record(2, overhead=overhead(3.0, 5.0))
    judged = judge(load_run(run_of(tmp_path / "run", make, run), "a"), 1)
    (cause,) = found_causes(judged).listed
    assert cause.bound_ms == pytest.approx(max(30.0 - 4.0 - cause.interval_ms[1], 0.0), abs=0.1)
    assert ", 4.00 ms of it aorta itself (mean of" in title(dataset("a", [judged]))
