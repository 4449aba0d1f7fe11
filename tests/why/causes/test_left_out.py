"""A rank that is late in the steps that the overhead left out alone: named from the host's marks in them."""

import math
import re

import pytest

from aorta.account.judge.cells import account_of
from aorta.account.judge.judged import dataset, judge
from aorta.account.judge.profiles import told_differences
from aorta.account.load.open import load_run
from aorta.account.newest import newest
from aorta.records.newest import Follower
from aorta.records.schema import HostUse, KernelSums, WorkOfStep
from aorta.timeline.types import OverlapRecord
from aorta.why.causes.rank import found_causes, late_rank
from aorta.why.causes.text import nothing_text
from tests.dist.launch import run_ranks
from tests.record.rank_programs import late_where_left_out
from tests.records.run_folders import run_record
from tests.why.causes.runs import Host, causes, run_of
from tests.why.causes.stacks import COMMON, write_stacks

FIRST, STEPS = 24, 80
LEFT_OUT = {
    "overlap": OverlapRecord(), "is_recorded": False, "collectives": None, "active_segments": None,
    "streams": {},
}  # fmt: skip


def two_ranks(
    folder, forward_ms, waits_ms, first_ms=(5.0, 5.0), delay_ms=lambda step, rank: 0.0, taken_ms=(0.0, 0.0)
):
    """Judged steps of a forward pass of so many ms by rank in steps that are left out, a backward pass that
    waits, and an optimizer. forward_ms, waits_ms, delay_ms of the step's start: of (step, rank)."""

    def make(rank, step, noise):
        if step < FIRST:
            most = max(first_ms)
            host = Host().work(first_ms[rank] * noise.gauss(1, 0.01))
            host.host += Host().idle(most + 5 - host.at, "backward").host
            return host.work(3.0).comm(most + 5 - host.at).work(0.5, "optimizer")
        host = (
            Host().work(forward_ms(step, rank) * noise.gauss(1, 0.01)).work(waits_ms(step, rank), "backward")
        )
        return host.work(0.5, "optimizer"), LEFT_OUT | {
            "delay_ms": delay_ms(step, rank),
            "host_use": HostUse(15.0, taken_ms[rank]),
        }

    return judge(load_run(run_of(folder, make, steps=STEPS), "a"))


def one_step_in_four(folder, host, recorded_more_ms, use=()):
    """80 steps, of which recorded ones are longer by so much."""

    def make(rank, step, noise):
        if step % 4 == 0:
            return host(noise).idle(recorded_more_ms), {"source": "kernels", **dict(use)}
        return host(noise), {"source": "kernels", **LEFT_OUT}

    return judge(load_run(run_of(folder, make, steps=STEPS), "a"))


def test_recorded_steps_are_not_called_all_that_are_judged(tmp_path):
    def waits(noise):
        return Host().work(28.0).idle(8.0 * noise.gauss(1, 0.01), "synchronisation").comm(2.0)

    found = causes(one_step_in_four(tmp_path / "run", waits, 1.0))
    (cause,) = [one for one in found if one.kind == "synchronisation"]
    assert re.search(r"in (19|20) of \1 recorded steps", cause.evidence[0])


def test_kernels_of_recorded_steps_are_a_share_of_these(tmp_path):
    """20 of 40 ms, where usual steps take 32."""
    kernels = KernelSums(num_kernels=80, classes={"elementwise": (12.0, 40), "copy": (8.0, 40)})
    judged = one_step_in_four(
        tmp_path / "run", lambda noise: Host().work(30.0).comm(2.0), 8.0, {"kernels": kernels}
    )
    single = dataset("a", [judged])
    told = nothing_text(single, found_causes(judged))
    assert "20.0 ms of the 40.0 ms recorded step, 50 % (elementwise 12.0, copy 8.00" in told


def late_ranks(judged):
    return [(cause.rank, cause.is_in_step) for cause in causes(judged) if cause.is_waited_for]


def test_the_rank_that_comes_to_the_backward_pass_last_is_named(tmp_path):
    """Rank 1 takes 20 ms longer in 56 of 79 judged steps."""
    judged = two_ranks(tmp_path / "run", lambda _, rank: (5.0, 25.0)[rank], lambda _, rank: (25.0, 5.0)[rank])
    (cause,) = [cause for cause in causes(judged) if cause.is_waited_for]
    assert (cause.kind, cause.rank, cause.is_in_step) == ("late_rank", 1, False)
    assert cause.ms == pytest.approx(20.0 * 56 / 79, rel=0.03)
    assert cause.interval_ms[0] < cause.ms < cause.interval_ms[1]
    assert "% of the run [" in cause.headline
    assert "the step time, which is of all judged steps" in cause.check
    assert "wait" not in cause.check
    assert late_rank(judged).wait_ms == pytest.approx(20.0, rel=0.03)


def test_a_rank_behind_at_every_mark_is_named_where_steps_are_as_much_longer(tmp_path):
    """Rank 0 reads its loss behind the optimizer's mark, and waits there for rank 1, which sleeps 20 ms."""
    judged = two_ranks(
        tmp_path / "run", lambda step, rank: 25.0, lambda _, rank: 5.0, delay_ms=lambda step, rank: 20 * rank
    )
    (cause,) = [cause for cause in causes(judged) if cause.is_waited_for]
    assert (cause.kind, cause.rank, cause.is_in_step) == ("late_rank", 1, False)
    assert cause.ms == pytest.approx(20.0 * 56 / 79, rel=0.06)


def test_a_rank_whose_cores_others_take_is_named_where_the_others_keep_theirs(tmp_path):
    """In steps of 30.5 ms, of which rank 1 waits 12 ms for a core; both come to all marks together."""
    passes = (lambda step, rank: 25.0, lambda step, rank: 5.0)
    judged = two_ranks(tmp_path / "run", *passes, taken_ms=(0.0, 12.0))
    (cause,) = [cause for cause in causes(judged) if cause.is_waited_for]
    assert (cause.subject, cause.is_in_step) == ("waiting for rank 1, which lacks cores", False)
    assert cause.ms == pytest.approx(12.0 * 56 / 79, rel=0.03)
    assert late_ranks(two_ranks(tmp_path / "both", *passes, taken_ms=(12.0, 12.0))) == []


@pytest.mark.parametrize(
    ("forward_ms", "waits_ms"),
    [
        pytest.param(lambda step, rank: 5.0 + 20 * (rank == step % 2),
                     lambda step, rank: 25.0 - 20 * (rank == step % 2), id="in-turn"),
        pytest.param(lambda step, rank: 25.0, lambda step, rank: 5.0, id="all"),
        pytest.param(lambda step, rank: (5.0, 8.0)[rank], lambda step, rank: (5.5, 2.5)[rank],
                     id="behind-in-a-step-that-is-no-longer"),
        pytest.param(lambda step, rank: 5.0 + 300 * (rank == step - 50 == 1),
                     lambda step, rank: 5.0 + 300 * (rank == 0 and step == 51), id="once"),
    ],
)  # fmt: skip
def test_no_rank_is_named_where_none_is_late_for_long(tmp_path, forward_ms, waits_ms):
    assert late_ranks(two_ranks(tmp_path / "run", forward_ms, waits_ms)) == []


def test_a_rank_behind_at_every_mark_of_steps_that_are_no_longer_is_not_named(tmp_path):
    judged = two_ranks(
        tmp_path / "run", lambda step, rank: 5.0, lambda _, rank: 5.0, delay_ms=lambda step, rank: 20 * rank
    )
    assert late_ranks(judged) == []


def test_a_rank_that_is_as_late_in_recorded_steps_is_named_by_these(tmp_path):
    forward_ms = (5.0, 25.0)
    judged = two_ranks(
        tmp_path / "run", lambda _, rank: forward_ms[rank], lambda _, rank: (25.0, 5.0)[rank], forward_ms
    )
    assert late_ranks(judged) == [(1, True)]


def test_a_rank_that_sleeps_in_steps_that_are_left_out_is_named_while_it_runs(tmp_path):
    run_ranks(late_where_left_out, 2, tmp_path)
    follower = Follower(tmp_path)
    follower.poll()
    late = newest(follower.ranks.values(), late_rank).late
    assert late.rank == 1
    assert late.wait_ms > 20
    assert (1, False) in late_ranks(judge(load_run(tmp_path, "a")))


@pytest.mark.parametrize(
    ("phase", "kinds"),
    [
        pytest.param("rest", [("pause", "augment(), straggler.py:5")], id="own-code"),
        pytest.param("checkpoint", [("checkpoint", "augment(), straggler.py:5")], id="checkpoint"),
        pytest.param("of one", [("checkpoint", "augment(), straggler.py:5")], id="checkpoint-of-rank-0"),
        pytest.param("forward", [], id="calls-of-the-model"),
        pytest.param(None, [], id="in-no-line"),
    ],
)
def test_a_rare_long_step_that_is_never_recorded_is_named_by_its_length(tmp_path, phase, kinds):
    """60 ms in each 16th of 80 steps; one in four is recorded, and none of these."""

    def make(rank, step, noise):
        host = Host().work(25.0 * noise.gauss(1, 0.01) + 60.0 * (step % 16 == 0))
        if step % 4 == 2:
            return host.work(3.0, "backward").comm(2.0)
        return host.work(5.0, "backward"), LEFT_OUT

    folder = run_of(tmp_path / "run", make, steps=STEPS)
    for rank in (0, 1):
        if phase == "of one":  # rank 1 waits for it
            rare = [("augment", ("checkpoint", "communication")[rank], "runs", 60.0, 16)]
        else:
            rare = [] if phase is None else [("augment", phase, "runs", 60.0, 16)]
        write_stacks(folder, rank, COMMON, *rare, steps=STEPS)
    found = causes(judge(load_run(folder, "run"), 1))
    assert [(cause.kind, cause.line and cause.line.text) for cause in found] == kinds
    for cause in found:
        assert (cause.is_in_step, "every 16th step" in cause.subject) == (False, True)
        assert ("on rank 0 in" in cause.subject) == (phase == "of one")
        assert cause.ms == pytest.approx(60.0 * 4 / 79, rel=0.03)
        assert cause.interval_ms[0] < cause.ms < cause.interval_ms[1]


def loop_with_a_stock(folder, wait_ms, recorded, first_without=28, busy_ms=lambda step: 0.0):
    """A step of 20 ms of kernels and launches; behind the stock that workers had, a batch is waited for in
    wait_ms. recorded: of a step. busy_ms: what later steps compute longer."""

    def make(rank, step, noise):
        waits = wait_ms if step >= first_without else 0.0
        host = Host().idle(waits * noise.gauss(1, 0.05), "data").work(12.0 + busy_ms(step))
        host = host.idle(8.0 * noise.gauss(1, 0.05)).work(0.5, "optimizer")
        return host, {"source": "kernels", **({} if recorded(step) else LEFT_OUT)}

    return judge(load_run(run_of(folder, make, steps=120), "a"))


def of_loading(judged):
    return [(cause.ms, cause.is_in_step) for cause in causes(judged) if cause.kind == "data_loading"]


def test_a_wait_for_batches_behind_a_stock_is_named_by_marks_of_steps_that_were_left_out(tmp_path):
    """The first 24 steps alone were recorded; 92 of 119 judged ones wait 10 ms."""
    judged = loop_with_a_stock(tmp_path / "run", 10.0, lambda step: step < 24)
    ((ms, is_in_step),) = of_loading(judged)
    assert not is_in_step
    assert ms == pytest.approx(10.0 * 92 / 119, rel=0.05)


def test_a_wait_in_some_steps_is_of_the_mean_step_of_the_rank_that_waits_most(tmp_path):
    """40 ms in every fourth of the 96 steps that were not recorded; the host of rank 1, a step behind, waits
    20 ms for its batch and 20 ms for rank 0. One of 23 recorded steps waits, too, and makes none usual."""

    def make(rank, step, noise):
        is_left_out = step >= 24
        first, second = ((40.0, 0.0), (20.0, 20.0))[rank]
        waits = step == 12 if not is_left_out else step % 4 == 1 + rank
        host = Host().idle(first * waits * noise.gauss(1, 0.02), "data").work(12.0).idle(second * waits)
        host = host.idle(8.0 * noise.gauss(1, 0.05)).work(0.5, "optimizer")
        return host, {"source": "kernels", **(LEFT_OUT if is_left_out else {})}

    judged = judge(load_run(run_of(tmp_path / "run", make, steps=120), "a"))
    (cause,) = [one for one in causes(judged) if one.kind == "data_loading"]
    assert cause.ms == pytest.approx(40.0 / 4 * 96 / 119, rel=0.05)
    assert cause.interval_ms[0] < cause.ms < cause.interval_ms[1]
    (told, *_) = cause.evidence
    assert told.startswith("by the host's marks the loop waits for its next batch in 48 of 119 judged steps")
    assert account_of(judged).mean_ms("data") > 1.0  # of the recorded one
    assert found_causes(judged).unexplained_ms["data"] == 0.0


@pytest.mark.parametrize(
    ("later_ms", "told_ms"), [(200.0, 200.0 / 8), (400.0, 200.0 / 8 + 200.0 / 8 * 96 / 119)]
)
def test_what_recorded_steps_wait_for_batches_is_told_once(tmp_path, later_ms, told_ms):
    """Each eighth step waits 200 ms, recorded or not; or those that were not recorded 400."""

    def make(rank, step, noise):
        wait_ms = (200.0 if step < 24 else later_ms) * (step % 8 == 4) * noise.gauss(1, 0.02)
        host = Host().idle(wait_ms, "data").work(20.0 * noise.gauss(1, 0.02)).work(0.5, "optimizer")
        return host, {"source": "kernels", **(LEFT_OUT if step >= 24 else {})}

    judged = judge(load_run(run_of(tmp_path / "run", make, steps=120), "a"))
    assert found_causes(judged).cannot_tell == []
    assert sum(ms for ms, _ in of_loading(judged)) == pytest.approx(told_ms, rel=0.1)


def test_a_longer_wait_of_steps_that_were_not_recorded_is_told_as_far_as_these_are_longer(tmp_path):
    """Every third step waits 150 ms where it is recorded and 255 where it is not, and the mean step takes 97
    and 105 ms: of 35 that it waits longer, 27 are work that it has less of."""

    def make(rank, step, noise):
        wait_ms, work_ms = 150.0 if step < 24 else 255.0, 20.0
        if step % 3:
            wait_ms, work_ms = 0.0, 60.0 if step < 24 else 20.0
        host = Host().idle(wait_ms * noise.gauss(1, 0.02), "data").work(work_ms * noise.gauss(1, 0.02))
        return host.work(0.5, "optimizer"), {"source": "kernels", **(LEFT_OUT if step >= 24 else {})}

    folder = run_of(tmp_path / "run", make, steps=120)
    for rank in (0, 1):
        write_stacks(folder, rank, COMMON, ("reading", "data", "sleeps", 100.0, 3), steps=120)
    judged = judge(load_run(folder, "a"))
    account, found = account_of(judged), found_causes(judged)
    assert found.cannot_tell == []
    (cause,) = [one for one in found.listed if one.kind == "data_loading"]
    assert cause.ms == pytest.approx(account.mean_ms("data", "unrecorded"))
    assert 0 < account.mean_ms("unrecorded") == pytest.approx(cause.ms - account.mean_ms("data"))
    assert cause.interval_ms[0] < cause.ms < cause.interval_ms[1] < account.mean_step_ms


@pytest.mark.parametrize(("name", "kinds"), [("item", []), ("augment", ["pause"])])
def test_a_host_that_lets_a_busy_device_catch_up_in_every_tenth_step_loses_nothing(tmp_path, name, kinds):
    """Steps that are not recorded take 32 ms, and every tenth 112; the device works for 40 in each."""

    def make(rank, step, noise):
        length = 40.0 if step < 24 else 112.0 if step % 10 == 0 else 32.0
        host = Host().work(length * noise.gauss(1, 0.002)).work(0.5, "optimizer")
        return host, {"source": "kernels", **(LEFT_OUT if step >= 24 else {})}

    folder = run_of(tmp_path / "run", make, steps=120)
    for rank in (0, 1):
        write_stacks(folder, rank, COMMON, (name, "rest", "runs", 80.0, 10), steps=120)
    assert [cause.kind for cause in causes(judge(load_run(folder, "a")))] == kinds


def test_a_later_block_shows_it_in_the_steps_that_the_account_is_of(tmp_path):
    """The first steps, which the stock served, are left aside."""
    judged = loop_with_a_stock(tmp_path / "run", 10.0, lambda step: step < 24 or 64 <= step < 72)
    account = account_of(judged)
    assert account.global_step.tolist() == [*range(64, 72)]
    assert account.mean_ms("data") == pytest.approx(10.0, rel=0.05)
    ((ms, is_in_step),) = of_loading(judged)
    assert is_in_step
    assert ms == pytest.approx(10.0, rel=0.05)


@pytest.mark.parametrize(
    ("wait_ms", "first_without", "busy_ms"),
    [
        pytest.param(0.0, 28, 10.0, id="longer-by-work"),
        pytest.param(10.0, 0, 10.0, id="waits-from-the-start"),
    ],
)
def test_longer_steps_that_wait_no_longer_are_not_loading(tmp_path, wait_ms, first_without, busy_ms):
    judged = loop_with_a_stock(
        tmp_path / "run", wait_ms, lambda step: step < 24, first_without, lambda step: busy_ms * (step >= 24)
    )
    assert [is_in_step for _, is_in_step in of_loading(judged) if not is_in_step] == []


def test_what_longer_steps_that_were_not_recorded_do_is_told_by_samples(tmp_path):
    """One in eight is recorded, and takes 10 ms less: it reads nothing from the program's own queue, which no
    mark of the host shows."""
    loop_with_a_stock(tmp_path, 0.0, lambda step: step % 8 == 3, busy_ms=lambda step: 10.0 * (step % 8 != 3))
    for rank in (0, 1):
        write_stacks(
            tmp_path,
            rank,
            COMMON,
            ("getitem", "rest", "sleeps", 40.0, 2),
            ("main", "rest", "runs", 10.0),
            steps=120,
        )
    (told,) = told_differences(judge(load_run(tmp_path, "a"), 1), None)
    assert told.title == "steps that were not recorded against the shorter ones that were"
    assert told.lines[0].text == "Rows.__getitem__(), data.py:7"
    assert told.lines[0].against_ms == 0.0 < told.lines[0].difference_ms


@pytest.mark.parametrize("recorded_more_ms", [0.0, 9.0])
def test_reductions_with_nothing_behind_them_may_delay_steps_that_nothing_holds_up(
    tmp_path, recorded_more_ms
):
    """Ten buckets in each of three passes, 9 ms exposed with nothing queued behind them, of which 5.8 are of
    needless ones beyond what delays the step: a host that recording holds up may be ahead without it."""
    sums = KernelSums(num_kernels=570, classes={"gemm": (21.0, 540), "communication": (9.0, 30)}, top=[])
    modules = [f"bucket {bucket}: layers.{bucket}" for bucket in range(10)]

    def make(rank, step, noise):
        host, is_recorded = Host(), step % 4 == 0
        for _ in range(3):
            host.idle(10.0 + is_recorded * recorded_more_ms / 3).work(7 + 0.03 * math.sin(step), "backward")
            for bucket in range(10):
                host.comm(0.3, size=8 << 20, module=bucket, lead=0.0)
        host.work(0.1, "optimizer")
        changes = {"kernels": sums, "modules": modules} if is_recorded else LEFT_OUT
        return host, {"source": "kernels", **changes}

    found = causes(judge(load_run(run_of(tmp_path / "run", make, steps=STEPS), "a")))
    (cause,) = [one for one in found if one.origin == "accumulated"]
    assert (cause.interval_ms[1] > 12.0) == (recorded_more_ms > 0)
    assert any("ms longer than others" in text for text in cause.evidence) == (recorded_more_ms > 0)


def test_of_steps_without_details_alone_no_cause_is_named(tmp_path):
    """As with --warmup 30, behind the 24 recorded ones."""

    def make(rank, step, noise):
        host = Host().work(20.0 * noise.gauss(1, 0.02)).work(0.5, "optimizer")
        return host, {"source": "host", **(LEFT_OUT if step >= 24 else {})}

    work = WorkOfStep(flops=1e9, bytes=1e7, unread=3e8, copies_bytes=1e6, copies=3, fp64=1e8)
    folder = run_of(tmp_path / "run", make, run_record(2, work=work), steps=120)
    judged = judge(load_run(folder, "a"), 30)
    assert causes(judged) == []
    assert nothing_text(dataset("a", [judged]), found_causes(judged)).startswith("No cause is named.")
