"""Losses that are not in every step, and what a busy machine takes: named as what they are, or not at all."""

import numpy as np
import pytest

from aorta.account.judge.cells import account_of
from aorta.account.judge.judged import judge
from aorta.account.judge.occasional import occasions
from aorta.account.load.open import load_run
from aorta.records.schema import HostUse
from aorta.timeline.types import OverlapRecord
from aorta.why.causes.finding import WAIT, CauseFinding
from aorta.why.causes.losses.slow_steps import _without_made_up
from aorta.why.causes.rank import found_causes, late_rank, worth
from tests.records.run_folders import run_record
from tests.why.causes.runs import MIB, Host, causes, plain, run_of, waited
from tests.why.causes.stacks import COMMON, write_stacks

STEPS = 42
LONG_MS = 40.0


def named(folder, make, steps=STEPS):
    return causes(judge(load_run(run_of(folder, make, steps=steps), "run"), 1))


def every_third_batch(rank, step, noise):
    return waited(LONG_MS, rank, step, noise) if step % 3 == 2 else plain(noise)


def some_batches(rank, step, noise):
    return waited(LONG_MS, rank, step, noise) if step in SOME else plain(noise)


SOME = {3, 4, 9, 13, 14, 20, 26, 27, 33, 38, 40}


def evaluates(rank, step, noise):
    return plain(noise, compute=70.0 if step % 4 == 1 else 30.0)


def few_bytes_at_last(rank, step, noise):
    """Gradients are reduced, and parameters updated, in every fourth step."""
    host = Host().work(30.0 * noise.gauss(1, 0.01))
    return host.comm(2.0, size=8 * MIB).work(20.0, "optimizer", "SGD", 400 * MIB) if step % 4 == 3 else host


def longer_batches(rank, step, noise):
    is_long = step % 4 == 1
    return plain(noise, compute=70.0 if is_long else 30.0), {"tokens": 3000 if is_long else 1000}


def with_a_tail(rank, step, noise):
    return waited(noise.lognormvariate(1.5, 1.0), rank, step, noise, late_rank=noise.choice((0, 1)))


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("make", "kind", "subject", "mean_ms"),
    [
        pytest.param(every_third_batch, "late_rank", "rank 1, every third step", 13.7, id="every-third"),
        pytest.param(some_batches, "late_rank", "rank 1", 10.7, id="at-random"),
        pytest.param(evaluates, "pause", "slow steps on all ranks, every fourth step", 10.2, id="evaluation"),
    ],
)
def test_a_loss_in_some_steps_is_named_with_its_mean(tmp_path, make, kind, subject, mean_ms):
    first = named(tmp_path / "run", make)[0]
    assert first.kind == kind
    assert subject in first.subject
    assert first.ms == pytest.approx(mean_ms, rel=0.05)
    low, high = first.interval_ms
    assert low <= first.ms <= high
    assert low > 0.4 * first.ms
    run = judge(load_run(tmp_path / "run", "run"), 1)
    assert first.bound_ms == pytest.approx(np.nanmean(run.values("step_ms")) - high, rel=1e-6)
    longest = run.values("step_ms").max(axis=0) > 60
    assert first.global_step in run.global_step[run.num_warmup :][longest]


@pytest.mark.heavy
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(few_bytes_at_last, id="accumulation"),
        pytest.param(longer_batches, id="longer-batches"),
        pytest.param(with_a_tail, id="ranks-late-in-turn-by-a-tail"),
    ],
)
def test_steps_that_have_more_to_do_are_no_cause(tmp_path, make):
    assert named(tmp_path / "run", make) == []


def taken_from(late_rank, least_ms, most_ms):
    """Other programs take the cores of one rank for a while in each step, which the other one waits for."""

    def make(rank, step, noise):
        ms = noise.uniform(least_ms, most_ms) if rank == late_rank else 0.0
        STOLEN[step] = ms if rank == late_rank else STOLEN.get(step, 0.0)
        if rank == late_rank:
            return Host().work(30.0 + ms).comm(2.0), {"host_use": HostUse(30.0, ms)}
        return Host().work(30.0).comm(2.0 + STOLEN[step]), {"host_use": HostUse(30.0, 0.0)}

    return make


STOLEN: dict[int, float] = {}


@pytest.mark.heavy
def test_a_rank_whose_cores_others_take_is_said_to_be_that(tmp_path):
    first = named(tmp_path / "run", taken_from(0, 30, 50))[0]
    assert (first.kind, first.rank) == ("late_rank", 0)
    assert any("its CPU cores were busy with other work" in sentence for sentence in first.evidence)
    assert "cores of its own" in first.change


@pytest.mark.heavy
def test_a_machine_that_is_a_little_busy_on_one_rank_is_no_cause(tmp_path):
    """12 % of the step: what two ranks on cores that other jobs use see of each other."""
    assert named(tmp_path / "run", taken_from(0, 2, 8)) == []


@pytest.mark.heavy
def test_a_short_delay_is_seen_through_what_others_take(tmp_path):
    """30 ms of sleep on rank 1 in every step, beside up to 60 ms by which either rank waits for a core."""

    def make(rank, step, noise):
        if rank == 0:
            TAKEN[step] = noise.uniform(0, 60), noise.uniform(0, 60)
        needs = [20.0 + TAKEN[step][0], 50.0 + TAKEN[step][1]]
        host = Host().work(needs[rank]).comm(2.0 + max(needs) - needs[rank])
        return host, {"host_use": HostUse(20.0, TAKEN[step][rank])}

    found = {cause.kind: cause for cause in named(tmp_path / "run", make)}
    late = found.pop("late_rank")
    assert late.rank == 1
    assert 15.0 < late.ms < 30.0
    assert any("sleeps" in sentence for sentence in late.evidence)
    assert list(found) == ["core_taken"]  # both wait 20 ms and more for a core


TAKEN: dict[int, tuple[float, float]] = {}


@pytest.mark.heavy
def test_an_optimizer_on_busy_cores_is_judged_by_what_it_needs_itself(tmp_path):
    """Its 4 MiB need a few ms of a core; it takes ten times as long because others have the core."""

    def make(rank, step, noise):
        return plain(noise, compute=200.0).work(50.0, "optimizer", "SGD", 4 * MIB), {
            "host_use": HostUse(25.0, 225.0)
        }

    assert [cause.kind for cause in named(tmp_path / "run", make)] == ["core_taken"]


def saves_every_second_step(rank, step, noise):
    host = plain(noise)
    return host.work(60.0, "checkpoint") if step % 2 == 1 else host


@pytest.mark.heavy
def test_a_loss_in_every_second_step_is_half_of_one_step(tmp_path):
    """Its median is all of it or nothing."""
    first = named(tmp_path / "run", saves_every_second_step)[0]
    assert first.subject == "checkpoint on all ranks, every second step"
    assert first.ms == pytest.approx(60.0 * 21 / 41, rel=0.01)


@pytest.mark.heavy
def test_four_evaluations_of_a_short_run_are_seen(tmp_path):
    def make(rank, step, noise):
        return plain(noise, compute=150.0 if step % 10 == 3 else 30.0)

    assert named(tmp_path / "run", make)[0].subject == "slow steps on all ranks, every 10th step"


SAVING = (3, 4, 8, 9, 13, 16, 18, 23, 25, 30, 31, 36, 38)
"""Of which every fourth is a short one."""


@pytest.mark.parametrize("gathers_ms", [0.0, 40.0])
def test_all_steps_that_save_are_the_occasions_of_a_checkpoint(tmp_path, gathers_ms):
    """Ten save for 60 ms, and ranks may gather for it; three for 4 ms."""

    def make(rank, step, noise):
        if step not in SAVING:
            return plain(noise)
        is_short = SAVING.index(step) % 4 == 3
        host = plain(noise, compute=30.0 if is_short else 30.0 + gathers_ms)
        return host.work(4.0 if is_short else 60.0, "checkpoint")

    (first,) = [cause for cause in named(tmp_path / "run", make) if cause.kind == "checkpoint"]
    (text,) = [text for text in first.evidence if text.startswith("saving")]
    (occasions,) = [text for text in first.evidence if text.endswith("a step on average")]
    assert "in 13 of 41 judged steps" in text
    assert occasions.startswith("in 13 of 41 steps, ")
    assert occasions.endswith(f"{first.ms:.1f} ms a step on average")
    assert first.ms == pytest.approx((10 * (60.0 + gathers_ms) + 3 * 4.0) / 41, rel=0.03)


def saves_every_tenth(rank, step, noise):
    """Times are taken in the first 24 steps alone, as with --overhead: two of them save, for 60 ms, and what
    was saved is touched anew for 12 ms more."""
    host = plain(noise)
    if step % 10 == 9:
        host.work(60.0, "checkpoint").work(12.0)
    return host, ({} if step < 24 else UNTIMED)


UNTIMED = {
    "overlap": OverlapRecord(),
    "streams": {},
    "active_segments": None,
    "collectives": None,
    "is_recorded": False,
}


def test_a_loss_that_few_of_the_timed_steps_have_is_sure_by_the_length_of_all(tmp_path):
    first = named(tmp_path / "run", saves_every_tenth, steps=80)[0]
    assert first.subject == "checkpoint on all ranks, every 10th step"
    low, high = first.interval_ms
    assert low < 7.2 < high < 2 * low
    assert first.ms == pytest.approx(72 * 2 / 23, rel=0.05)


@pytest.mark.parametrize(
    ("behind_ms", "each_ms"),
    [
        ((30.0, 30.0, 30.0), 30.0),
        ((25.0, 30.0, 30.0), 25.0),
        ((20.0, 20.0, 20.0), None),
        ((36.0, 30.0), 30.0),
    ],
    ids=["none", "a-little", "all", "they-are-longer"],
)
def test_what_the_steps_behind_a_slow_one_make_up_for_is_not_lost(behind_ms, each_ms):
    """Every tenth step takes 60 ms where the others take 30."""
    step_ms = np.full(80, 30.0)
    for step in range(5, 80, 10):
        step_ms[step] = 60.0
        step_ms[step + 1 : step + 1 + len(behind_ms)] = behind_ms[: len(step_ms) - step - 1]
    found = _without_made_up(occasions(step_ms, np.arange(80)), step_ms)
    assert (found and found.each_ms) == (each_ms and pytest.approx(each_ms))


@pytest.mark.parametrize(("frame", "phase", "kinds"), [
    pytest.param("model", "communication", [], id="waits-for-the-other"),
    pytest.param("augment", "rest", ["pause"], id="works"),
    pytest.param("augment", "checkpoint", ["checkpoint"], id="saves"),
])  # fmt: skip
def test_slow_steps_in_which_the_sampled_ranks_wait_are_no_checkpoint(tmp_path, frame, phase, kinds):
    """Steps of rank 1 are 80 ms longer in every tenth, none of which was timed. What ranks do besides, no
    sample of a slow step shows."""

    def make(rank, step, noise):
        host = plain(noise)
        if step % 10 == 0 and rank:
            host.work(80.0)
        return host, ({} if step < 10 else UNTIMED)

    folder = run_of(tmp_path, make, steps=80)
    for rank in (0, 1):
        rows = [(frame, phase, "runs", 80.0, 10)] if rank else []
        write_stacks(folder, rank, COMMON, ("tensor", "rest", "runs", 3.0, 79), *rows, steps=80)
    assert [cause.kind for cause in causes(judge(load_run(folder, "run"), 1))] == kinds


@pytest.mark.parametrize(("later_ms", "kinds"), [(30.0, ["core_taken"]), (3.0, [])])
def test_cores_are_taken_as_much_as_in_all_steps_and_not_as_in_the_recorded_ones(tmp_path, later_ms, kinds):
    """30 of 70 ms in the first 24 steps, whose times are taken; how long a thread waits for a core all steps
    tell."""

    def make(rank, step, noise):
        taken_ms = 30.0 if step < 24 else later_ms
        host = plain(noise, compute=38.0 + taken_ms)
        return host, {"host_use": HostUse(38.0, taken_ms)} | ({} if step < 24 else UNTIMED)

    judged = judge(load_run(run_of(tmp_path / "run", make, steps=200), "run"), 1)
    assert [cause.kind for cause in causes(judged)] == kinds
    assert account_of(judged).mean_ms("core_taken") == pytest.approx(later_ms, rel=0.02)


@pytest.mark.parametrize(("taken_ms", "kinds"), [(0.0, ["late_rank"]), (30.0, ["core_taken"])])
def test_a_rank_that_needs_more_of_a_core_is_named_where_others_leave_it_alone(tmp_path, taken_ms, kinds):
    """40 ms of CPU against 28: a core that others use too is as much slower at the same work."""

    def make(rank, step, noise):
        cpu_ms = (28.0, 40.0)[rank]
        host = Host().work(taken_ms + cpu_ms * noise.gauss(1, 0.01)).comm((14.0, 2.0)[rank])
        return host, {"host_use": HostUse(cpu_ms, taken_ms)}

    assert [cause.kind for cause in named(tmp_path / "run", make)] == kinds


@pytest.mark.parametrize(
    ("optimizer_ms", "kind", "ms", "change"),
    [
        pytest.param(3.0, "imbalance", 25.0 / 3.0**0.5, "give all ranks as much work", id="more-work"),
        pytest.param(6.0, "late_rank", 53.0, "give all ranks as much work", id="maybe-a-slower-core"),
    ],
)
def test_what_a_rank_has_more_of_is_shared_and_does_not_vanish(tmp_path, optimizer_ms, kind, ms, change):
    """Rank 1 takes 100 ms for the passes that take rank 0 50, which waits. Equal work would take 75, and
    up to 91.7 if both share cores meanwhile: between 8.3 and 25 ms less."""

    def make(rank, step, noise):
        forward_ms, backward_ms = ((20.0, 30.0), (40.0, 60.0))[rank]
        own_ms, update_ms = forward_ms + backward_ms, (3.0, optimizer_ms)[rank]
        host = Host().work(forward_ms * noise.gauss(1, 0.01)).work(backward_ms, "backward")
        host.work(update_ms, "optimizer").comm(2.0 + 100.0 + optimizer_ms - own_ms - update_ms)
        return host, {"host_use": HostUse(own_ms + update_ms, 0.0)}

    explained = found_causes(judge(load_run(run_of(tmp_path / "run", make, steps=STEPS), "run"), 1))
    (first,) = explained.listed
    assert (first.kind, first.rank, first.is_waited_for) == (kind, 1, True)
    assert explained.unexplained_ms["wait"] < 2.0
    assert first.ms == pytest.approx(ms, rel=0.02)
    least, most = first.interval_ms
    assert least < (25.0 / 3 if kind == "imbalance" else 25.0)
    assert 25.0 < most < 1.01 * 53.0
    assert first.bound_ms > 50.0  # what rank 0 takes without waiting
    assert first.change.startswith(change)
    assert "expert" not in first.change + first.check  # there are none
    told = "the optimizer, which has as much to do on all, 1 times: it has more work, and no slower core"
    assert any(text.endswith(told) for text in first.evidence) == (kind == "imbalance")


def test_what_chance_deals_anew_in_each_step_has_no_memory():
    """Of 24 steps the later ones lose more: another run may drift on, but is dealt other batches."""
    ms = np.linspace(10.0, 30.0, 24)
    usual, dealt = (
        worth(CauseFinding("imbalance", ms, {WAIT: 1.0}, facts={"op": op}), np.arange(24))
        for op in ("kernels", "batches")
    )
    assert dealt.interval_ms == pytest.approx((20.0 - 2.6, 20.0 + 2.6), abs=0.01)  # Student's, 23 of freedom
    assert usual.interval_ms[0] < dealt.interval_ms[0] - 5.0


def test_no_cause_is_named_of_two_steps(tmp_path):
    judged = judge(load_run(run_of(tmp_path, lambda *_: Host().work(30.0).after(300.0), steps=3), "a"), 1)
    found = found_causes(judged)
    assert (found.listed, found.no_loss) == ([], ["2 judged steps: too few to name a cause."])


@pytest.mark.parametrize(("usual_ms", "often"), [(0.0, ", every fourth step"), (8.0, "")])
def test_a_loss_is_of_the_slow_steps_that_have_most_of_it(tmp_path, usual_ms, often):
    def make(rank, step, noise):
        return (
            Host().work(usual_ms + 60.0 * (step % 4 == 0), "data").work(30.0 * noise.gauss(1, 0.01)).comm(2.0)
        )

    (cause,) = named(tmp_path / "run", make)
    assert cause.subject == f"data loading on all ranks{often}"
    assert cause.ms == pytest.approx(usual_ms + 15.0, rel=0.1)


@pytest.mark.parametrize("where", ["next-step", "barrier-behind-the-update"])
def test_work_of_one_rank_in_no_step_is_half_as_long_where_two_have_a_part(tmp_path, where):
    """Behind every eighth of 64 steps of 22 ms rank 0 works for 80 ms, for which rank 1 waits in its next
    step, or in the same: 80 ms behind 7 of 62 steps, told once. Done less often it may save all of it."""

    def make(rank, step, noise):
        late_ms = 80.0 if step and step % 8 == 0 else 0.0
        begin_ms = 22.0 * step + 80.0 * (max(step - 1, 0) // 8)
        host = Host().work(20.0 * noise.gauss(1, 0.001))
        if where == "next-step":
            begin_ms += late_ms if rank == 0 else 0.0
            host.comm(2.0 + (late_ms if rank else 0.0))
        else:
            begin_ms += late_ms
            host.comm(2.0)
            if rank and step % 8 == 7 and step < 63:
                host.comm(80.0, "barrier", size=0)
        return host, {"start_unix_ns": 10**18 + int(begin_ms * 1e6)}

    record = run_record(2, coverage={"evaluations": {"times": 7, "s": 0.56}})
    judged = judge(load_run(run_of(tmp_path, make, record, steps=64), "run"), 1)
    (cause,) = causes(judged)
    assert cause.subject == "evaluation or other work in no step on rank 0"
    assert cause.ms == pytest.approx(80.0 * 7 / 62 / 2, rel=0.01)
    assert cause.interval_ms == (pytest.approx(cause.ms, rel=0.35), pytest.approx(2 * cause.ms, rel=0.35))
    assert cause.change == (
        "let each rank do a part of it, which saves 4.51 ms for each step; or do it less often, or on fewer"
        " batches, which may save up to 9.03 ms"
    )
    assert (cause.rank, cause.is_waited_for) == (0, True)
    # 7 of them and 62 steps of 22 ms are 1.92 s.
    assert cause.evidence[0] == (
        "7 gaps between two steps on rank 0, 80.0 ms each, together 0.560 s: 29 % of the time from the first"
        " judged step to the last, in no step; the others wait for it"
    )
    assert late_rank(judged).wait_ms == 2 * cause.ms
    assert found_causes(judged).unexplained_ms["wait"] < 1.0  # what rank 1 waits is that again


def test_work_of_all_ranks_in_no_step_may_be_divided_among_them(tmp_path):
    """80 ms behind every eighth of 64 steps of 22 ms, of each of two ranks."""

    def make(rank, step, noise):
        begin_ms = 22.0 * step + 80.0 * (step // 8)
        return Host().work(20.0).comm(2.0), {"start_unix_ns": 10**18 + int(begin_ms * 1e6)}

    (cause,) = causes(judge(load_run(run_of(tmp_path, make, run_record(2), steps=64), "run"), 1))
    assert (cause.subject, cause.rank) == ("evaluation or other work in no step", None)
    assert cause.change.startswith(
        "let each rank do a part of it, where all go through the same rows; or do it less often"
    )


def test_work_of_a_single_rank_in_no_step_is_waited_for_by_nobody(tmp_path):
    """80 ms behind every eighth of 64 steps of 20 ms."""

    def make(rank, step, noise):
        begin_ms = 20.0 * step + 80.0 * (step // 8)
        return Host().work(20.0), {"start_unix_ns": 10**18 + int(begin_ms * 1e6), "world_size": 1}

    folder = run_of(tmp_path, make, run_record(1), steps=64, width=1)
    (cause,) = causes(judge(load_run(folder, "run"), 1))
    assert (cause.subject, cause.rank) == ("evaluation or other work in no step", None)
