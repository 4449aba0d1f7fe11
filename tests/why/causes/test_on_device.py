"""What the host does while a device idles: it launches, sleeps, or works for itself."""

import ast
import math
import re
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from aorta.account.cause import Cause, CodeLine
from aorta.account.judge.answer import dataset_answer
from aorta.account.judge.judged import dataset, judge
from aorta.account.load.open import load_run
from aorta.account.load.rank.phases import PREFIX
from aorta.records.files import kernels_name, sites_name
from aorta.records.schema import (
    UNLIKE,
    CallSite,
    CallSites,
    CallsOfFewRows,
    HostSpan,
    HostUse,
    KernelNames,
    KernelSums,
    LineOfWork,
    LossLoop,
    OperatorLoop,
    WorkOfStep,
)
from aorta.records.stacks import StackFrame
from aorta.records.writer import write_json
from aorta.timeline.types import Kind, Span
from aorta.why.causes import rank as rank_module
from aorta.why.causes import text as text_module
from aorta.why.causes.finding import CauseFinding
from aorta.why.causes.losses import kernels_by_name, of_a_step, program_code
from aorta.why.causes.losses.kernels_by_name import _tf32_as_fast
from aorta.why.causes.losses.needless import (
    _all_of_it,
    _emulated,
    lines_text,
    loop_of,
    loss_loop,
    needless_work,
)
from aorta.why.causes.losses.program_code import _computes_by_itself, _slowed
from aorta.why.causes.losses.transfer import Exposure, _largest
from aorta.why.causes.losses.waiting import IN_STEP, follows, in_step
from aorta.why.causes.rank import Worth, _once, _place, causes_of, found_causes
from aorta.why.causes.rules import rules
from aorta.why.causes.source import Source
from aorta.why.causes.text import _unexplained_text, fact_texts, filled, nothing_text, title
from tests.records.run_folders import run_record
from tests.why.causes.runs import RATE, Host, causes, run_of, sampled
from tests.why.causes.stacks import COMMON, TRAIN, write_stacks

pytestmark = pytest.mark.heavy

STEPS = 33
LONG_MS = 90.0
KERNELS = {"source": "kernels"}
MEMORY = sampled()["memory"]
HOST = [("backward", 20.0), ("rest", 12.0)]
"""ms of its phases."""
LINE = StackFrame("train.py", 5, "Model.forward", True)


def named(folder, make, steps=STEPS, run=None):
    return causes(judge(load_run(run_of(folder, make, run, steps=steps), "run"), 1))


def usual(noise):
    return Host().work(28.0 * noise.gauss(1, 0.01)).comm(2.0)


def used(cpu_ms):
    return KERNELS | {"host_use": HostUse(cpu_ms, 0.0)}


def rank_0_alone(cpu_ms):
    """Its device idles in every fourth step, and its thread has the core for cpu_ms."""

    def make(rank, step, noise):
        if step % 4 != 1:
            return usual(noise), used(3.0)
        if rank == 0:
            return Host().idle(LONG_MS).work(28.0).comm(2.0), used(cpu_ms)
        return Host().work(28.0).comm(2.0 + LONG_MS), used(3.0)

    return make


def test_a_host_that_sleeps_in_some_steps_makes_its_rank_late(tmp_path):
    first = named(tmp_path / "run", rank_0_alone(4.0))[0]
    assert (first.kind, first.rank) == ("late_rank", 0)
    assert first.subject == "waiting for rank 0, every fourth step"
    assert any("host's thread sleeps" in sentence for sentence in first.evidence)
    assert first.ms == pytest.approx(LONG_MS / 4, rel=0.05)


def test_a_host_with_work_of_its_own_in_some_steps_is_not_bound_by_launches(tmp_path):
    first = named(tmp_path / "run", rank_0_alone(LONG_MS))[0]
    assert (first.kind, first.rank) == ("late_rank", 0)


@pytest.mark.parametrize(("cpu_ms", "kind", "idle_ms"), [(45.0, "launch_bound", 12.0), (2.0, "pause", 12.0)])
def test_all_ranks_that_idle_launch_or_sleep(tmp_path, cpu_ms, kind, idle_ms):
    def make(rank, step, noise):
        return Host().idle(12.0 * noise.gauss(1, 0.01)).work(28.0).comm(2.0), used(cpu_ms)

    first = named(tmp_path / "run", make)[0]
    assert first.kind == kind
    assert first.ms == pytest.approx(idle_ms, rel=0.05)


def rank_0_behind(lead_ms, told_every=1, op="all_reduce"):
    """Rank 1 waits 10 ms for it in every step, in such a collective; at the next one, which is long enough to
    be matched where it is the only one to be, its host is ahead by lead_ms.

    told_every: one step in so many tells when its collectives were launched.
    """

    def make(rank, step, noise):
        first, second = (0.0, lead_ms) if step % told_every == 0 else (None, None)
        host = Host().idle(10.0) if rank == 0 else Host()
        host.comm(2.0 if rank == 0 else 12.0, op, lead=first)
        last_ms = 1.0 if op == "all_reduce" else 6.0
        return host.work(20.0 * noise.gauss(1, 0.01)).comm(last_ms, lead=second), used(45.0)

    return make


def test_a_wait_behind_which_work_is_queued_is_for_the_late_rank(tmp_path):
    first, *others = named(tmp_path / "run", rank_0_behind(15.0))
    assert (first.kind, first.rank) == ("late_rank", 0)
    assert first.ms == pytest.approx(10.0, rel=0.05)
    assert [cause.kind for cause in others] == ["transfer"]
    assert any(text.startswith("launches: 10.0 ms a step there") for text in first.evidence)


@pytest.mark.parametrize(("lead_ms", "lost_ms"), [(15.0, [10.0]), (0.0, [])])
def test_what_a_rank_waits_in_a_broadcast_is_lost_as_far_as_its_host_is_ahead(tmp_path, lead_ms, lost_ms):
    """No arrivals tell that wait; the transfer of 6 ms behind it is none."""
    found = named(tmp_path / "run", rank_0_behind(lead_ms, op="broadcast"))
    late = [(cause.rank, cause.ms) for cause in found if cause.kind == "late_rank"]
    assert late == [(0, pytest.approx(ms, rel=0.05)) for ms in lost_ms]


@pytest.mark.parametrize(
    ("in_line", "ms"), [pytest.param(20, 5.0, id="handed out there"), pytest.param(33, 10.0, id="elsewhere")]
)
def test_a_rank_that_loads_what_it_hands_out_leaves_each_its_part(tmp_path, in_line, ms):
    """Rank 0 loads for 10 ms, and rank 1's device waits for it in a broadcast."""
    folder = run_of(tmp_path / "run", rank_0_behind(15.0, op="broadcast"), steps=STEPS)
    write_stacks(folder, 0, ("loads", "rest", "runs", 10.0), ("backward", "backward", "runs", 20.0))
    write_stacks(folder, 1, ("backward", "backward", "sleeps", 30.0))
    site = dict(file=TRAIN, line=in_line, op="broadcast", moves="a tensor", num_calls=4, bytes=4 * (8 << 20))
    for rank in (0, 1):
        called = CallSite(**site, function="main" if in_line == 20 else "log")
        (folder / sites_name(rank)).write_bytes(msgspec.json.encode(CallSites(num_steps=4, sites=[called])))
    [late] = [one for one in causes(judge(load_run(folder, "run"), 1)) if one.kind == "late_rank"]
    assert (late.rank, late.ms) == (0, pytest.approx(ms, rel=0.05))
    assert (late.origin == "dealt") == (in_line == 20)
    assert ("hands 8.0 MiB a step to the others, in main(), train.py:20" in late.change) == (in_line == 20)


@pytest.mark.parametrize(
    ("waits_ms", "more_ms", "lost_ms"),
    [
        pytest.param(0.0, 0.0, None, id="the others were once ahead"),
        pytest.param(10.0, 10.0, 10.0, id="they wait for as long as it takes longer"),
        pytest.param(4.0, 4.0, 4.0, id="they wait less than their devices"),
        pytest.param(0.0, 5.0, 5.0, id="they come further ahead in each step"),
        pytest.param(10.0, 4.0, 4.0, id="they wait for something else as well and fall back"),
        pytest.param(2.0, 2.0, None, id="less than hosts of equal ranks differ by"),
        pytest.param(10.0, (12.0, -8.0), None, id="the ranks are slow in turn"),
        pytest.param(10.0, (10.0, 10.0, -2.0, -2.0), None, id="it is slow in half of the run"),
    ],
)
def test_a_rank_that_launches_late_costs_what_its_host_is_slower(tmp_path, waits_ms, more_ms, lost_ms):
    """Rank 0's device starves for 10 ms of 40 and rank 1 waits for it in every step. Rank 0's host takes
    more_ms longer in its forward pass, in steps or stretches in turn, and rank 1's waits waits_ms elsewhere.
    """
    judged = judge(load_run(run_of(tmp_path / "run", rank_0_behind(15.0), steps=STEPS), "run"), 1)
    num = judged.metrics["step_ms"].shape[1]
    turns = np.atleast_1d(more_ms)
    more = np.resize(turns, num) if len(turns) < 3 else np.repeat(turns, -(-num // len(turns)))[:num]
    forward = np.stack([20.0 + more, np.full(num, 20.0)])
    logging = np.stack([np.zeros(num), np.full(num, waits_ms)])
    phases = {"step": forward + logging, "logging": logging, "forward": forward}
    hosts = {f"host.phase.{name}": values for name, values in phases.items()}
    judged = msgspec.structs.replace(
        judged,
        host_parts={**judged.host_parts, **hosts, "host.until.update": forward},
        metrics={**judged.metrics, "kernel_count.gemm": np.full((2, num), 100)},
    )
    found = found_causes(judged)
    late = [cause for cause in found.listed if cause.kind == "late_rank"]
    assert [cause.ms for cause in late] == ([] if lost_ms is None else [pytest.approx(lost_ms, rel=0.05)])
    of_order = [text for text in found.no_loss if "the rest is the order in which hosts launch" in text]
    assert len(of_order) == (lost_ms is None and np.mean(more_ms) <= 2.5)
    for text in of_order:
        waited_ms = re.match(r"The others wait (\S+) ms a step for rank 0", text)[1]
        assert float(waited_ms) == pytest.approx(10.0, rel=0.05)
    if lost_ms is not None:
        said = f"its host takes {lost_ms:.3g} ms longer than the others' (most: forward), in 32 of 32"
        assert said.replace("10 ms", "10.0 ms") in late[0].evidence[1].replace(".00 ms", " ms")


@pytest.mark.parametrize(
    ("until", "num_lost"),
    [
        pytest.param(lambda steps: 30.0 + 10.0 * (steps % 4), 0, id="the lead comes and goes"),
        pytest.param(lambda steps: 60.0 + 0.0 * steps, 1, id="at the end of the queue in every step"),
    ],
)
def test_a_queue_holds_a_host_back_where_its_lead_stays(tmp_path, until, num_lost):
    """Rank 1's host is 0 to 30, or 30 of 40 ms ahead of rank 0's, 1,200 launches of 1,600; no phase is
    longer. All of the wait is then the most that rank 0 costs."""
    judged = judge(load_run(run_of(tmp_path / "run", rank_0_behind(15.0), steps=STEPS), "run"), 1)
    steps = np.arange(judged.metrics["step_ms"].shape[1])
    whole = np.full((2, len(steps)), 40.0)
    of_host = {"host.phase.step": whole, "host.phase.forward": whole * 0.5}
    of_host["host.until.update"] = np.stack([until(steps), 30.0 + 0.0 * steps])
    judged = msgspec.structs.replace(
        judged,
        host_parts={**judged.host_parts, **of_host},
        metrics={**judged.metrics, "kernel_count.gemm": np.full_like(whole, 1600.0)},
    )
    late = [cause for cause in causes(judged) if cause.rank == 0]
    assert [(cause.kind, cause.interval_ms) for cause in late] == [("late_rank", None)] * num_lost
    assert all(cause.ms == pytest.approx(10.0, rel=0.05) and "at most" in cause.headline for cause in late)


@pytest.mark.parametrize(("source", "ranks"), [("kernels", [0]), ("events", [])])
def test_what_events_call_compute_may_be_the_wait_for_the_host(tmp_path, source, ranks):
    """Rank 0 computes 10 ms longer, by events with what it idles meanwhile for its host, which is no slower;
    both devices idle 12 ms."""

    def make(rank, step, noise):
        host = Host().idle(12.0).work((30.0 if rank == 0 else 20.0) * noise.gauss(1, 0.01))
        return host.comm(1.0 if rank == 0 else 11.0, lead=15.0), used(45.0) | {"source": source}

    judged = judge(load_run(run_of(tmp_path / "run", make, steps=STEPS), "run"), 1)
    whole = np.full((2, judged.metrics["step_ms"].shape[1]), 40.0)
    of_host = {"host.phase.step": whole, "host.phase.forward": whole / 2, "host.until.update": whole}
    judged = msgspec.structs.replace(judged, host_parts={**judged.host_parts, **of_host})
    assert [cause.rank for cause in causes(judged) if cause.is_waited_for] == ranks


@pytest.mark.parametrize(("until", "rank"), [(17, None), (5, 1)])
def test_a_rank_is_named_for_a_part_of_its_step_that_it_is_late_by_all_along_the_run(tmp_path, until, rank):
    """Rank 0's device idles 6 ms in its optimizer until a step, half or an eighth of the way, and rank 1's 12
    ms from then on; the other one waits. Two thirds and more are rank 1's."""

    def make(own, step, noise):
        late_ms = 6.0 if step < until else 12.0
        is_late = own == (step >= until)
        host = Host().idle(late_ms, "optimizer") if is_late else Host()
        return host.work(28.0 * noise.gauss(1, 0.01)).comm(2.0 if is_late else 2.0 + late_ms), used(45.0)

    first = named(tmp_path / "run", make)[0]
    assert (first.kind, first.rank) == ("optimizer", rank)


def test_a_host_that_is_slower_in_recorded_steps_alone_costs_nothing(tmp_path):
    """Rank 0's host takes 10 ms longer in the half of the steps that was recorded, rank 1's in the rest."""
    judged = judge(load_run(run_of(tmp_path / "run", rank_0_behind(15.0), steps=STEPS), "run"), 1)
    num = judged.metrics["step_ms"].shape[1]
    more = np.where(np.arange(num) < num / 2, 5.0, -5.0)
    forward = np.stack([20.0 + more, 20.0 - more])
    hosts = {"host.phase.step": np.full((2, num), 40.0), "host.phase.forward": forward}
    all_steps = msgspec.structs.replace(judged, host_parts={**judged.host_parts, **hosts})
    late = [cause for cause in causes(msgspec.structs.replace(judged, part_of=all_steps)) if cause.rank == 0]
    assert late == []


@pytest.mark.parametrize(
    ("loads_ms", "rank", "lost_ms"),
    [(35.0, None, 35.0), (2.0, 1, 38.0)],
    ids=["all load", "one loads longer"],
)
def test_a_rank_that_came_ahead_loads_all_the_same(tmp_path, loads_ms, rank, lost_ms):
    """Rank 1's device idles for 40 ms while its host loads. Rank 0's host loads for loads_ms while its device
    waits for rank 1: it came ahead once, and would wait for its own host instead."""

    def make(one, step, noise):
        work_ms = 20.0 * noise.gauss(1, 0.01)
        if one == 1:
            return Host().idle(40.0, "data").work(work_ms).comm(2.0, lead=15.0), used(45.0)
        host = Host().work(work_ms).comm(42.0, lead=15.0)
        host.host.append(HostSpan("data", 21.0, 21.0 + loads_ms))
        return host, used(45.0)

    first = named(tmp_path / "run", make)[0]
    assert (first.kind, first.rank, first.ms) == ("data_loading", rank, pytest.approx(lost_ms, rel=0.02))


def test_a_rank_that_waits_computes_no_less_for_it(tmp_path):
    """It computes beside a collective that has begun: both compute 20 ms, and rank 1 launches 8 ms late."""

    def make(rank, step, noise):
        if rank == 1:
            return Host().idle(8.0).work(20.0).comm(2.0, lead=20.0), used(45.0)
        host = Host().work(10.0).comm(18.0, start=10.0, lead=10.0)
        return host.work(10.0).idle(8.0).comm(2.0, lead=30.0), used(20.0)

    first = named(tmp_path / "run", make)[0]
    assert (first.kind, first.rank) == ("late_rank", 1)
    assert not any(text.startswith("compute:") for text in first.evidence)


def test_a_wait_behind_which_nothing_is_launched_is_nobodys_fault(tmp_path):
    """If rank 0 came in time, rank 1 would idle instead: its host launches what comes next only then."""
    first, *others = named(tmp_path / "run", rank_0_behind(0.0))
    assert (first.kind, first.rank) == ("launch_bound", None)
    assert [(cause.kind, round(cause.ms)) for cause in others] == [("transfer", 1)]  # the last one's
    assert first.ms == pytest.approx(10.0, rel=0.05)
    assert any("of launches and 5.00 ms of the" in text for text in first.evidence)


@pytest.mark.parametrize(("lead_ms", "kind"), [(15.0, "late_rank"), (0.0, "launch_bound")])
def test_steps_that_do_not_tell_launches_are_judged_by_those_that_do(tmp_path, lead_ms, kind):
    first = named(tmp_path / "run", rank_0_behind(lead_ms, told_every=4))[0]
    assert first.kind == kind
    assert first.ms == pytest.approx(10.0, rel=0.05)


def test_lines_that_do_not_tell_the_use_of_cores_leave_idle_time_to_launches(tmp_path):
    def make(rank, step, noise):
        return Host().idle(12.0 * noise.gauss(1, 0.01)).work(28.0).comm(2.0), KERNELS

    assert named(tmp_path / "run", make)[0].kind == "launch_bound"


def launches(num_small, num_large=50, idle_ms=12.0):
    """The device idles 12 of 42 ms; num_small kernels of 4 us, num_large of half a ms."""
    classes = {"elementwise": (num_small * 0.004, num_small), "gemm": (num_large * 0.5, num_large)}
    kernels = KernelSums(num_kernels=num_small + num_large, classes=classes, top=[])

    def make(rank, step, noise):
        host = Host().idle(idle_ms * noise.gauss(1, 0.01)).work(28.0).comm(0.5)
        return host, used(45.0) | {"kernels": kernels}

    return make


def test_what_timing_kernels_takes_of_launches_is_no_loss_of_the_program(tmp_path):
    """2,050 launches of 1.6 us are 3.28 ms."""
    first = named(tmp_path / "many", launches(2000))[0]
    assert any(text.startswith("about 3.28 ms of it may come of timing") for text in first.evidence)
    elsewhere = run_record(2, versions={"hip": "6.4"})
    of_rocm = named(tmp_path / "rocm", launches(2000), run=elsewhere)[0]
    assert first.interval_ms[0] == pytest.approx(of_rocm.interval_ms[0] * (1 - 3.28 / first.ms))
    assert not named(tmp_path / "little", launches(2000, idle_ms=8.0))
    assert named(tmp_path / "little of rocm", launches(2000, idle_ms=8.0), run=elsewhere)


def test_late_launches_are_a_loss_where_small_kernels_explain_them(tmp_path):
    assert named(tmp_path / "many", launches(2000))[0].kind == "launch_bound"
    assert not named(tmp_path / "few", launches(100))
    run = run_record(2, variables={"TORCHDYNAMO_DISABLE": "1"})
    told = named(tmp_path / "off", launches(2000), run=run)[0].change
    assert told.startswith("leave TORCHDYNAMO_DISABLE=1 out of the environment")
    assert "compiles nothing with it; torch.compile(model)" in told


@pytest.mark.parametrize(
    ("compute_ms", "told_ms", "most_ms"),
    [
        pytest.param(20.0, 13.3, 26.5, id="of-a-host-that-bounds-the-step"),
        pytest.param(60.0, 4.4, 26.5, id="not-where-its-device-does"),
    ],
)
def test_barriers_cost_what_a_host_that_bounds_the_step_is_seen_in_them(
    tmp_path, compute_ms, told_ms, most_ms
):
    """40 of them, launched 0.1 or 0.9 ms apart: 4.4 ms at least, while the device idles for 20. The thread is
    seen in them for a third of a step, which a device that bounds it would take all the same."""

    def make(rank, step, noise):
        host = Host().work(compute_ms * noise.gauss(1, 0.01))
        for place in range(40):
            host.idle((0.09, 0.89)[place % 2]).comm(0.01, "barrier", size=0, lead=0.0)
        return host, used(compute_ms + 20.0)

    folder = run_of(tmp_path / "run", make, steps=STEPS)
    for rank in (0, 1):
        write_stacks(folder, rank, COMMON, ("of_log", "communication", "runs", 15.0), steps=STEPS)
    first = next(one for one in causes(judge(load_run(folder, "run"), 1)) if one.kind == "small_messages")
    assert first.ms == pytest.approx(told_ms, rel=0.1)
    assert first.interval_ms[0] < told_ms < first.interval_ms[1] < most_ms
    is_seen = any("calls of torch.distributed for 13.3 ms" in text for text in first.evidence)
    assert is_seen == (compute_ms < 40.0)


@pytest.mark.parametrize(("value", "launch_ms"), [("1", 0.5), ("0", 0.5), ("1", 0.0)])
def test_calls_that_a_setting_makes_the_host_wait_for_are_told_to_go_without_it(tmp_path, value, launch_ms):
    """54 of 0.5 ms, in which the device idles; where it does not, fewer calls are what is told."""

    def make(rank, step, noise):
        host = Host().work(30.0 * noise.gauss(1, 0.01))
        for _ in range(54):
            host.idle(launch_ms).comm(0.3 - launch_ms / 2, size=8 << 10, lead=0.0)
        return host, used(60.0)

    run = run_record(2, environment={"TORCH_NCCL_BLOCKING_WAIT": value})
    first = next(one for one in named(tmp_path / "run", make, run=run) if one.kind == "small_messages")
    is_all = (value, launch_ms) == ("1", 0.5)
    assert first.change.startswith("leave TORCH_NCCL_BLOCKING_WAIT=1 out") == (value == "1")
    assert ("stack the values into one tensor" in first.change) != is_all
    assert first.check.endswith("idle_ms and host_ms should fall") == is_all


def of_a_loop(in_loop, kind="parts", at=LINE, operators=((LINE, 1000),)):
    """A step of 1000 operators. operators: of each line."""
    loop = OperatorLoop(
        kind=kind, at=at, first_line=at.line, last_line=at.line, iterations=96, operators=100,
        all_operators=in_loop, flops=0.0, bytes=0.0,
    )  # fmt: skip
    numbers = dict.fromkeys(("flops", "bytes", "forward_flops", "forward_bytes", "handed_bytes"), 0.0)
    lines = [LineOfWork(at=line, operators=num, **numbers) for line, num in operators]
    return WorkOfStep(flops=1.0, loop=loop, lines=lines)


@pytest.mark.parametrize(
    ("in_loop", "kind", "remedy"),
    [
        (800, "modules", "make one module"),
        (800, "recurrence", "do before or behind"),
        (800, "parts", "work on all at once"),
        (300, "parts", "torch.compile(model)"),
    ],
)
def test_launches_of_a_loop_have_its_remedy(tmp_path, in_loop, kind, remedy):
    work = of_a_loop(in_loop, kind)
    first = named(tmp_path / "run", launches(2000), run=run_record(2, work=work))[0]
    assert first.kind == "launch_bound"
    assert first.change.startswith(remedy)
    assert any("800 of a step's 1,000 operators" in text for text in first.evidence) == (in_loop == 800)
    assert (first.line and first.line.text) == (LINE.text if in_loop == 800 else None)


@pytest.mark.parametrize("num", [16, 2])
def test_launches_of_many_calls_of_the_model_are_told_to_be_fewer(tmp_path, num):
    calls = CallsOfFewRows(num=num, rows=8, operators=100, parameter_bytes=1000, at=LINE)
    work = WorkOfStep(flops=1.0, calls=calls)
    first = named(tmp_path / "run", launches(2000), run=run_record(2, work=work))[0]
    of_calls = f"larger micro-batches: the step calls the model {num} times, on 8 rows each"
    assert first.change.startswith(of_calls if num == 16 else "torch.compile(model)")
    assert (LINE.text in first.change) == (num == 16)


@pytest.mark.parametrize(
    ("in_loop", "kind", "lost_ms"),
    [
        (800, "parts", 0.8 * 12.0),
        (800, "recurrence", 0.8 * 12.0),
        (800, "modules", None),
        (300, "parts", None),
    ],
)
def test_large_kernels_of_a_loop_come_late_for_its_operators(tmp_path, in_loop, kind, lost_ms):
    """Of 12 ms in which the device idles, the part of the loop's operators; modules may be large."""
    found = named(tmp_path / "few", launches(100), run=run_record(2, work=of_a_loop(in_loop, kind)))
    assert [cause.kind for cause in found] == ([] if lost_ms is None else ["launch_bound"])
    if lost_ms is not None:
        assert found[0].ms == pytest.approx(lost_ms, rel=0.05)


def line(function, number):
    return StackFrame("moe.py", number, function, True)


OUTER, EXPERTS = line("Model.forward", 38), [line("Experts.forward", number) for number in (19, 23, 26, 27)]


@pytest.mark.parametrize(
    ("nums", "told"),
    [
        pytest.param((30, 40, 250, 600, 80), "Experts.forward(), moe.py:23 to :27", id="in-what-it-calls"),
        pytest.param((30, 40, 0, 930, 0), "Experts.forward(), moe.py:26", id="in-one-line"),
        pytest.param((600, 40, 100, 180, 80), "Model.forward(), moe.py:38", id="in-its-own-line"),
        pytest.param((300, 300, 100, 200, 100), "Model.forward(), moe.py:38", id="in-several-functions"),
    ],
)
def test_a_loop_is_where_its_operators_are(nums, told):
    """Few rounds of a function that is called often are counted where it is called."""
    work = of_a_loop(900, at=OUTER, operators=[*zip((OUTER, *EXPERTS), nums, strict=True)])
    assert lines_text(loop_of(work)) == told


@pytest.mark.parametrize(("seen_ms", "lost_ms"), [(20.0, 12.0), (6.0, 6.0), (2.0, None)])
def test_idle_time_while_the_host_is_in_one_function_is_that_functions(
    tmp_path, monkeypatch, seen_ms, lost_ms
):
    """Few kernels, and 12 ms without one queued: a forward pass draws numbers with numpy."""
    monkeypatch.setattr(of_a_step, "code_in_model", lambda _: (LINE, seen_ms))
    found = named(tmp_path / "few", launches(100))
    assert [cause.kind for cause in found] == ([] if lost_ms is None else ["program_code"])
    if lost_ms is not None:
        assert found[0].ms == pytest.approx(lost_ms, rel=0.05)
        assert found[0].line.text == LINE.text
        assert "on the device" in found[0].change


ENGINE = StackFrame("torch", 0, "_engine_run_backward", False)
LOOP = StackFrame("train.py", 50, "<module>", True)
FORWARD = StackFrame("train.py", 7, "Block.forward", True)
OWN_BACKWARD = StackFrame("train.py", 20, "Quantise.backward", True)
HELPER = StackFrame("train.py", 30, "levels", True)


@pytest.mark.parametrize(
    ("path", "found"),
    [
        pytest.param([LOOP, ENGINE, OWN_BACKWARD], OWN_BACKWARD, id="autograd.Function"),
        pytest.param([LOOP, ENGINE, OWN_BACKWARD, HELPER], OWN_BACKWARD, id="with-what-it-calls"),
        pytest.param([LOOP, OWN_BACKWARD], None, id="the-loop's-own"),
        pytest.param([LOOP, ENGINE], None, id="the-loop"),
        pytest.param([LOOP, FORWARD, HELPER], HELPER, id="in-a-forward-pass"),
        pytest.param([LOOP, ENGINE, FORWARD], None, id="the-model-computed-again"),
    ],
)
def test_what_computes_by_itself_within_the_passes(path, found):
    assert _computes_by_itself(path, {(FORWARD.file, FORWARD.line)}) == found


def test_a_line_of_the_model_without_operators_computes_by_itself():
    """As numpy does; nobody knows where operators were not counted."""
    assert _computes_by_itself([LOOP, FORWARD], {(FORWARD.file, 8)}) == FORWARD
    assert _computes_by_itself([LOOP, FORWARD], {(FORWARD.file, 7)}) is None
    assert _computes_by_itself([LOOP, FORWARD], set()) is None
    assert _computes_by_itself([LOOP], {(FORWARD.file, 8)}) is None


def test_what_a_program_is_made_of_is_a_fact_of_its_account(tmp_path):
    run = load_run(run_of(tmp_path / "run", launches(100), steps=STEPS), "a")
    single = dataset("a", [judge(run, 1)])
    text = nothing_text(single, found_causes(single.first))
    assert re.search(
        r"is launches, 12\S* ms of the step, 30 %: the host runs and has nothing queued on the device\. ",
        text,
    )
    assert "The host bounds the step: 150 kernels" in text
    assert "torch.compile launches less" in text


@pytest.mark.parametrize(
    ("dry_ms", "is_told"),
    [
        pytest.param((40.0, 40.0), True, id="both-in-turn"),
        pytest.param((8.0, 8.0), False, id="other-waits"),
        pytest.param((0.0, 0.0), False, id="batches-differ"),
    ],
)
def test_ranks_that_wait_for_late_launches_in_turn_are_bound_by_their_hosts(monkeypatch, dry_ms, is_told):
    """Two ranks wait 30 ms for each other: the device of the awaited one has nothing queued."""
    by_rank = np.full((2, 8), 30.0)
    account = SimpleNamespace(
        exposed=SimpleNamespace(caused_ms=by_rank, wait_ms=by_rank),
        cells={"launch": np.repeat(np.array(dry_ms)[:, None], 8, axis=1)},
        ranks=[0, 1],
        step_ms=np.full((2, 8), 100.0),
    )
    monkeypatch.setattr(text_module, "kernels_by_class", lambda dataset: [SimpleNamespace(count=600.0)])
    single = SimpleNamespace(first=SimpleNamespace(noted=run_record(2)))
    told = text_module._reason_text("wait", single, account)
    assert told.startswith("Most of it is for a rank whose device runs dry") == is_told
    assert ("The host bounds the step: 600 kernels" in told) == is_told


MOVES = LineOfWork(at=LINE, operators=20, flops=0.0, bytes=9e9, forward_flops=0.0, forward_bytes=3e9,
                   handed_bytes=0.0)  # fmt: skip


@pytest.mark.parametrize(
    ("copies_ms", "lines", "told"),
    [
        (1.0, [], r"Nothing worth changing: "),  # 11 of 40 ms
        (5.0, [], r"No cause is named\. .*Kernels .* 15\.0 ms of the step, 3[78] % .* was not counted;"),
        (
            5.0,
            [MOVES],
            r"No cause is named\. .* of the model's lines Model\.forward\(\), train\.py:5 moves most",
        ),
    ],
)
def test_nothing_is_worth_changing_only_where_little_passes_through_memory(tmp_path, copies_ms, lines, told):
    kernels = KernelSums(num_kernels=80, classes={"elementwise": (10.0, 40), "copy": (copies_ms, 40)})

    def make(rank, step, noise):
        return Host().work(39.5 * noise.gauss(1, 0.01)).comm(0.5), used(45.0) | {"kernels": kernels}

    folder = run_of(tmp_path / "run", make, run_record(2, work=WorkOfStep(lines=lines)), steps=STEPS)
    single = dataset("a", [judge(load_run(folder, "a"), 1)])
    assert re.match(told, nothing_text(single, found_causes(single.first)))


@pytest.mark.parametrize(("every", "is_nothing"), [(1, True), (4, False)])
def test_nothing_is_worth_changing_only_where_samples_would_show_own_code(tmp_path, every, is_nothing):
    folder = run_of(tmp_path / "run", lambda rank, step, noise: Host().work(39.5).comm(0.5), steps=STEPS)
    for rank in (0, 1):
        write_stacks(folder, rank, (*COMMON, every), steps=STEPS)
    single = dataset("a", [judge(load_run(folder, "a"), 1)])
    text = nothing_text(single, found_causes(single.first))
    assert text.startswith("Nothing worth changing") == is_nothing
    assert (
        "samples of the training thread cannot tell what the program's own code takes" in text
    ) != is_nothing


def test_samples_of_the_warm_up_alone_show_no_own_code(tmp_path):
    folder = run_of(tmp_path / "run", lambda rank, step, noise: Host().work(39.5).comm(0.5), steps=STEPS)
    write_stacks(folder, 0, COMMON, steps=1)
    single = dataset("a", [judge(load_run(folder, "a"), 4)])
    text = nothing_text(single, found_causes(single.first))
    assert text.startswith("No cause is named.")
    assert "No sample of the training thread in these steps tells what the program's own code takes" in text


@pytest.mark.parametrize(
    ("name", "are_joined"), [("vectorized_elementwise_kernel", True), ("indexing_backward_kernel", False)]
)
def test_kernels_that_an_index_leads_are_not_said_to_be_joined_by_compile(tmp_path, name, are_joined):
    kernels = KernelSums(num_kernels=40, classes={"elementwise": (15.0, 40)}, top=[(0, 14.0, 30)])

    def make(rank, step, noise):
        return Host().work(39.5 * noise.gauss(1, 0.01)).comm(0.5), used(45.0) | {"kernels": kernels}

    folder = run_of(tmp_path / "run", make, steps=STEPS)
    for rank in (0, 1):
        write_json(folder / kernels_name(rank), KernelNames(names=[name]))
    single = dataset("a", [judge(load_run(folder, "a"), 1)])
    told = nothing_text(single, found_causes(single.first))
    assert f"the longest is {name}" in told
    assert ("torch.compile joins those of one function" in told) == are_joined


@pytest.mark.parametrize(
    ("gemm_ms", "kind", "ms", "told"),
    [
        pytest.param((4.0, 4.0), "imbalance", 9.0, "those of gemm take as long on all", id="more-work"),
        pytest.param((0.4, 0.4), "imbalance", 9.0, "those of gemm take as long on all", id="much-more-work"),
        pytest.param((0.1, 0.1), "late_rank", 18.0, "compute: 32", id="nothing-else-to-compare"),
        pytest.param((10.0, 4.0), "late_rank", 18.0, "compute: 32", id="maybe-a-slower-device"),
    ],
)
def test_of_a_rank_that_computes_longer_equal_work_saves_what_is_beyond_the_mean(
    tmp_path, gemm_ms, kind, ms, told
):
    """32 ms there and 14 on the other rank: equal work saves 9 of the 18 that one waits for the other, a
    device that is mended all of them."""

    def make(rank, step, noise):
        own_ms = 18.0 * (rank == 0) * noise.gauss(1, 0.01)
        classes = {"gemm": (gemm_ms[rank], 26), "elementwise": (10.0 + own_ms, 60)}
        kernels = KernelSums(num_kernels=86, classes=classes)
        return Host().work(14.0 + own_ms).comm(2.0 + 18.0 * (rank == 1)), used(45.0) | {"kernels": kernels}

    run = run_record(2, work=WorkOfStep(model_at=StackFrame("a.py", 3, "main", True)))
    first = named(tmp_path / "run", make, run=run)[0]
    assert ("main(), a.py:3" in first.headline) == (kind == "imbalance")
    assert (first.kind, first.rank, first.ms) == (kind, 0, pytest.approx(ms, rel=0.02))
    assert any(told in text for text in first.evidence)
    least, most = first.interval_ms
    assert least < 9.0 < most
    assert (most > 18.0) == (kind == "late_rank")


@pytest.mark.parametrize(
    ("steps_at", "steps"),
    [
        ("torch.optim.adam.Adam.step", "judged Adam steps"),
        ("torch.optim.sgd.SGD.step + torch.optim.adam.Adam.step", "judged steps"),
        ("every backward pass, as no optimizer is called", "judged steps"),
    ],
)
def test_a_step_is_told_by_the_optimizer_that_ends_it(tmp_path, steps_at, steps):
    """A loop of the program may have several."""
    run = run_record(2, coverage={"steps_at": steps_at})
    folder = run_of(tmp_path, lambda rank, step, noise: usual(noise), run, steps=STEPS)
    told = title(dataset("a", [judge(load_run(folder, "a"), 1)]))
    assert f"(mean of 32 {steps}, 2 ranks" in told


def test_what_no_cause_explains_is_one_sentence():
    """9 + 2 ms, more than the first cause."""
    listed = [SimpleNamespace(ms=10.0, is_of_trace=False)]
    causes = SimpleNamespace(listed=listed, unexplained_ms={"launch": 9.0, "wait": 2.0})
    told = "Not explained by these: 11.0 ms a step without compute (launches 9.00, waiting for ranks 2.00)."
    assert _unexplained_text(causes, 40.0) == told


def reads_values(num, kernels):
    """num values one by one, each waited for in 0.05 ms, with 0.25 ms of launches between."""

    def make(rank, step, noise):
        host = Host().work(28.0 * noise.gauss(1, 0.01)).comm(0.5)
        for _ in range(num):
            host.idle(0.05, "synchronisation").idle(0.25)
        return host, used(45.0) | {"kernels": kernels}

    return make


def test_launches_between_waits_of_a_loop_are_for_these_waits(tmp_path):
    kernels = KernelSums(num_kernels=900, classes={"elementwise": (3.6, 900)}, top=[])
    [first] = named(tmp_path / "run", reads_values(40, kernels))
    assert first.kind == "synchronisation"
    assert first.ms == pytest.approx(40 * 0.3, rel=0.05)


@pytest.mark.parametrize(
    ("loop", "is_told"),
    [
        pytest.param("for one in range(64):", True, id="in-a-loop"),
        pytest.param("if epoch:", False, id="in-no-loop"),
        pytest.param("for parameter in model.parameters():", False, id="of-tensors"),
    ],
)
def test_values_that_a_loop_reads_are_one_tensor_without_it(tmp_path, monkeypatch, loop, is_told):
    """Line 33 reads 16, and the device idles behind each."""
    text = "\n" * 31 + f"{loop}\n    total += (found == one).sum().item()\n"
    monkeypatch.setattr(rank_module, "source_of", lambda file, record: Source(ast.parse(text), b""))
    kernels = KernelSums(num_kernels=900, classes={"elementwise": (3.6, 900)}, top=[])

    def make(rank, step, noise):
        host = Host().work(28.0 * noise.gauss(1, 0.01)).comm(0.5)
        for _ in range(16):
            host.host.append(HostSpan("synchronisation", host.at, host.at + 0.5, "item in train.py:33"))
            host.idle(0.75)
        return host, used(45.0) | {"kernels": kernels}

    [first] = named(tmp_path / "run", make)
    assert first.kind == "synchronisation"
    words = "make what the loop around" if is_told else "what the host does not need at once"
    assert first.change.startswith(words)


def test_idle_time_behind_the_update_is_the_programs_own_code(tmp_path):
    """It writes a summary for 9 ms, and has nothing queued meanwhile."""
    few = KernelSums(num_kernels=50, classes={"gemm": (25.0, 50)}, top=[])

    def make(rank, step, noise):
        host = Host().work(28.0 * noise.gauss(1, 0.01)).comm(0.5).idle(0.1, "optimizer").idle(9.0)
        return host, used(45.0) | {"kernels": few}

    [first] = named(tmp_path / "run", make)
    assert (first.kind, first.ms) == ("program_code", pytest.approx(9.0, rel=0.05))
    assert "behind the optimizer" in first.evidence[0]


@pytest.mark.parametrize(
    ("sent_ms", "copied_ms", "is_told"),
    [
        pytest.param(9.0, 3.0, True, id="weights"),
        pytest.param(3.0, 3.0, True, id="weights-and-what-is-done-to-them"),
        pytest.param(9.0, 0.1, False, id="single-values"),
        pytest.param(0.0, 3.0, False, id="copies-of-other-code"),
    ],
)
def test_code_that_copies_tensors_to_the_host_may_work_on_the_device(tmp_path, sent_ms, copied_ms, is_told):
    """An average of the weights that is kept on the host."""
    copies = {"device_to_pageable": copied_ms}
    few = KernelSums(num_kernels=50, classes={"gemm": (25.0, 50)}, top=[(0, 25.0, 50)], copies=copies)

    def make(rank, step, noise):
        host = Host().work(28.0 * noise.gauss(1, 0.01)).comm(0.5).idle(0.1, "optimizer").idle(9.0)
        return host, used(45.0) | {"kernels": few}

    folder = run_of(tmp_path / "run", make, steps=STEPS)
    for rank in (0, 1):
        parts = [("sent", "rest", "runs", 3.0)] * round(sent_ms / 3)
        parts += [("item", "rest", "runs", 3.0)] * (3 - len(parts))
        write_stacks(folder, rank, *parts, COMMON, steps=STEPS)
    (first, *_) = causes(judge(load_run(folder, "run"), 1))
    assert first.line.text == "augment(), straggler.py:5"
    assert ("which copies tensors to the host" in first.subject) == is_told
    assert first.change.startswith("keep on the device what augment(), straggler.py:5 has") == is_told


def test_what_one_step_alone_has_is_no_loss_of_each_step(tmp_path):
    """The tenth one idles for 300 ms, 9.4 ms of the mean step, as where kernels are loaded."""
    few = KernelSums(num_kernels=50, classes={"gemm": (25.0, 50)}, top=[])

    def make(rank, step, noise):
        host = Host().work(28.0 * noise.gauss(1, 0.01)).comm(0.5).idle(0.1, "optimizer")
        return host.idle(300.0 * (step == 9)), used(340.0 if step == 9 else 45.0) | {"kernels": few}

    found = found_causes(judge(load_run(run_of(tmp_path, make, steps=STEPS), "run"), 1))
    assert found.listed == []
    assert found.no_loss == [
        "The program's own code on all ranks: 299.9 ms in step 9 alone, as a first use has them: no loss of"
        " each step."
    ]


def evaluates(rank, step, noise):
    host = usual(noise)
    return (host.after(300.0, is_busy=True) if step % 10 == 9 else host.after(0.004)), used(3.0)


def test_an_evaluation_between_steps_counts_though_the_device_is_busy(tmp_path):
    """Three of 32 judged steps, 300 ms each."""
    first = named(tmp_path / "run", evaluates)[0]
    assert first.kind == "between_steps"
    assert first.ms == pytest.approx(300 * 3 / 32, rel=0.02)
    assert first.evidence[0].startswith("300.0 ms pass between two steps on all ranks, in 3 of 32")
    assert first.global_step in (9, 19, 29)
    assert first.check.endswith("; between_steps_ms should fall")


def test_what_the_device_computes_between_all_steps_is_no_time_between_them(tmp_path):
    """A graph's replay returns at once: the host is between steps for as long as the device computes."""
    found = named(
        tmp_path / "run", lambda _, step, noise: (usual(noise).after(30.0, is_busy=True), used(3.0))
    )
    assert "between_steps" not in [cause.kind for cause in found]


def test_a_report_begins_with_the_largest_cause_where_the_median_step_has_none_of_it(tmp_path):
    run = load_run(run_of(tmp_path / "run", evaluates, steps=STEPS), "a")
    single = dataset("a", [judge(run, 1)])
    answer = dataset_answer(single, causes_of(single))
    assert answer.startswith("a: time between steps on all ranks, every 10th step: 28.1 ms a step, 48 %")
    print(dataset_answer(single))
    assert dataset_answer(single).startswith("a: a step takes 58.")


def test_a_batch_behind_the_body_counts_where_lines_keep_no_segments(tmp_path):
    """Lines that keep them have short waits alone, which the device's queue hides."""

    def make(rank, step, noise):
        host = usual(noise)
        if step % 6 == 5:
            return host.after(LONG_MS, "data"), used(3.0) | {"active_segments": None}
        host.host.append(HostSpan("data", 1.0, 2.0))
        return host, used(3.0)

    first = named(tmp_path / "run", make)[0]
    assert first.kind == "data_loading"
    assert first.ms == pytest.approx(LONG_MS / 6, rel=0.1)


def evaluates_in_the_step(rank, step, noise):
    """The step's function goes on behind the optimizer's update: every fifth step holds an evaluation."""
    host = usual(noise).idle(0.5, "optimizer")
    return (host.work(40.0).idle(20.0) if step % 5 == 4 else host.work(0.5)), used(3.0)


def test_work_behind_the_update_in_some_steps_is_none_of_the_step(tmp_path):
    first = named(tmp_path / "run", evaluates_in_the_step)[0]
    assert (first.kind, first.subject) == ("between_steps", "slow steps on all ranks, every fifth step")
    assert first.ms == pytest.approx(60.0 / 5, rel=0.1)
    assert any(text.startswith("in these steps 60") for text in first.evidence)


def gives_memory_back(rank, step, noise):
    host = Host().idle(6.0 * noise.gauss(1, 0.01)).work(28.0).comm(2.0)
    return host, used(40.0) | {"memory": msgspec.structs.replace(MEMORY, num_device_frees=7 * step)}


def test_idle_launches_are_of_the_memory_that_each_step_gives_back(tmp_path):
    first = named(tmp_path / "run", gives_memory_back)[0]
    assert (first.kind, first.ms) == ("memory", pytest.approx(6.0, rel=0.05))
    assert "empty_cache" in first.change
    assert any("gives 7 segments back" in text for text in first.evidence)
    for rank in (0, 1):  # the line that gives it back, not the one that asks for it again
        asks, gives = ("augment", "rest", "runs", 6.0), ("empty_cache", "rest", "runs", 0.5)
        write_stacks(tmp_path / "run", rank, COMMON, asks, gives, steps=STEPS)
    (cause,) = (one for one in causes(judge(load_run(tmp_path / "run", "run"), 1)) if one.kind == "memory")
    assert (cause.line.text, cause.line.calls) == ("main(), train.py:20", "empty_cache of torch")
    assert cause.change.startswith("leave main(), train.py:20 out of the loop")


@pytest.mark.parametrize(("behind", "ms"), [("empty_cache", 11.0), ("augment", 6.0)])
def test_memory_may_be_given_back_between_steps(tmp_path, behind, ms):
    """5 ms pass there, in empty_cache() by its samples, or in what else the program does."""

    def make(rank, step, noise):
        host, more = gives_memory_back(rank, step, noise)
        return host.after(5.0), more

    folder = run_of(tmp_path / "run", make, steps=STEPS)
    for rank in (0, 1):
        write_stacks(folder, rank, COMMON, (behind, "rest", "runs", 5.0), steps=STEPS, behind=[behind])
    found = causes(judge(load_run(folder, "run"), 1))
    (cause,) = (one for one in found if one.kind == "memory")
    assert cause.ms == pytest.approx(ms, rel=0.05)
    assert [one.kind for one in found if one.kind == "between_steps"] == ["between_steps"] * (ms == 6.0)


ANOMALY = {"modes": {"anomaly_detection": True}}


def test_late_launches_of_a_backward_pass_are_its_checks_where_anomaly_detection_is_on(tmp_path):
    """Of 12 ms of idle time, 4 ms while a forward pass keeps stacks, and 7 in a backward pass of 7 ms."""

    def make(rank, step, noise):
        host = Host().idle(5.0 * noise.gauss(1, 0.01)).work(20.0).idle(7.0, "backward").comm(2.0)
        return host, used(30.0)

    folder = run_of(tmp_path / "run", make, msgspec.structs.replace(run_record(2), program=ANOMALY), STEPS)
    for rank in (0, 1):
        kept = ("checkcache", "forward", "runs", 4.0)
        passes = ("main", "forward", "runs", 23.0), ("backward", "backward", "sleeps", 7.0)
        write_stacks(folder, rank, kept, *passes, steps=STEPS)
    first = causes(judge(load_run(folder, "run"), 1))[0]
    assert (first.subject, first.line) == ("autograd's anomaly detection on all ranks", None)
    assert first.ms == pytest.approx(4.0 + 7.0, rel=0.05)
    assert "set_detect_anomaly(False)" in first.change


@pytest.mark.parametrize(("busy_ms", "num", "low_ms"), [(3.0, 600, 6.0), (28.0, 600, 10.8)])
def test_where_launches_wait_for_kernels_the_shorter_of_host_and_device_goes(tmp_path, busy_ms, num, low_ms):
    """The device idles for 12 ms: 3 ms of kernels and 600 ways of 5 us there and back; or all of it, but
    2 us between two kernels."""
    kernels = KernelSums(num_kernels=num, classes={"gemm": (busy_ms, num)}, top=[])

    def make(rank, step, noise):
        host = Host().idle(12.0 * noise.gauss(1, 0.01)).work(busy_ms).comm(0.01)
        return host, used(45.0) | {"kernels": kernels}

    blocking = msgspec.structs.replace(run_record(2), environment={"CUDA_LAUNCH_BLOCKING": "1"})
    first = named(tmp_path / "run", make, run=blocking)[0]
    assert (first.kind, first.ms) == ("launch_bound", pytest.approx(low_ms, rel=0.05))
    assert first.interval_ms[1] >= 11.9
    assert first.change.startswith("leave CUDA_LAUNCH_BLOCKING=1 out")
    assert first.change.endswith("each launch waits for its kernel"), "what else helps, it hides"


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("at = torch.tensor(at, device=device)", "synchronisation"),
        ("at = torch.tensor(at)", "program_code"),  # looks at the values of a list
        ("at = torch.tensor(at).to(device)", "program_code"),
    ],
)
def test_who_hands_numbers_to_the_device_waits_for_it(tmp_path, monkeypatch, text, kind):
    """For 8 ms of 42, of which the device idles 10 behind it; the copies themselves take 1 us."""
    copies = KernelSums(
        num_kernels=1, classes={"gemm": (28.0, 1)}, copies={"pageable_to_device": 1e-3}, top=[(0, 28.0, 1)]
    )

    def make(rank, step, noise):
        host = Host().idle(10.0 * noise.gauss(1, 0.01)).work(28.0)
        return host.comm(2.0), KERNELS | {"kernels": copies}

    folder = run_of(tmp_path / "run", make, steps=STEPS)
    for rank in (0, 1):
        write_stacks(folder, rank, COMMON, ("tensor", "rest", "runs", 8.0), steps=STEPS)
    source = Source(ast.parse("\n" * 19 + text), b"")  # line 20, as samples have it
    monkeypatch.setattr(program_code, "source_of", lambda file, record: source)
    first = causes(judge(load_run(folder, "run"), 1))[0]
    assert (first.kind, first.line.line, first.ms) == (kind, 20, pytest.approx(8.0, rel=0.1))
    assert first.change.startswith("leave the number of main(), train.py:20") == (kind == "synchronisation")


def test_a_hook_that_reads_values_costs_a_host_that_bounds_the_step_what_it_is_there(tmp_path):
    """8 of them in line 33, where samples show it for 3 ms; the device idles for 12 ms of 42."""
    kernels = KernelSums(num_kernels=2000, classes={"elementwise": (8.0, 2000)}, top=[])

    def make(rank, step, noise):
        host = Host().idle(12.0 * noise.gauss(1, 0.01)).work(28.0)
        host.host += [HostSpan("synchronisation", i, i + 0.01, "item in train.py:33") for i in range(13, 21)]
        return host.comm(2.0), used(40.0) | {"kernels": kernels}

    folder = run_of(tmp_path / "run", make, steps=STEPS)
    for rank in (0, 1):
        reads, others = ("own_hook", "forward", "runs", 3.0), ("norm", "forward", "runs", 39.0)
        write_stacks(folder, rank, reads, others, steps=STEPS)
    (reads,) = (one for one in causes(judge(load_run(folder, "run"), 1)) if one.kind == "synchronisation")
    assert (reads.line.line, reads.ms) == (33, pytest.approx(3.0, rel=0.05))
    assert any("reads values of the device 8 times a step or more" in text for text in reads.evidence)


@pytest.mark.parametrize(
    ("idle_ms", "lost_ms"),
    [
        # Of 42 ms: all that samples show of the function, in which the device would not idle.
        pytest.param(8.0, 8.0, id="the-device-bounds-the-step"),
        # Its line that reads alone, for 3 ms.
        pytest.param(24.0, 3.0, id="the-host-bounds-the-step"),
    ],
)
def test_of_a_function_that_reads_values_a_host_that_bounds_the_step_gains_the_waits(
    tmp_path, idle_ms, lost_ms
):
    """It launches kernels in line 5 for 5 of 8 ms, and waits for 8 values in line 9."""
    kernels = KernelSums(num_kernels=200, classes={"elementwise": (18.0, 200)}, top=[])

    def make(rank, step, noise):
        host = Host().work(40.0 - idle_ms).idle(idle_ms * noise.gauss(1, 0.01))
        host.host += [
            HostSpan("synchronisation", i, i + 0.01, "item in straggler.py:9") for i in range(2, 10)
        ]
        return host.comm(2.0), used(40.0) | {"kernels": kernels}

    folder = run_of(tmp_path / "run", make, steps=STEPS)
    for rank in (0, 1):
        own = ("augment", "rest", "runs", 5.0), ("reading", "rest", "runs", 3.0)
        write_stacks(folder, rank, *own, ("norm", "forward", "runs", 34.0), steps=STEPS)
    (reads,) = (one for one in causes(judge(load_run(folder, "run"), 1)) if one.kind == "synchronisation")
    assert reads.ms == pytest.approx(lost_ms, rel=0.05)


def all_reduces_at_the_end(rank, step, noise):
    return Host().work(28.0 * noise.gauss(1, 0.01)).comm(2.0), used(3.0)


def test_communication_that_nothing_hides_is_named_from_a_smaller_share_on(tmp_path):
    first = named(tmp_path / "run", all_reduces_at_the_end)[0]
    assert (first.kind, first.ms) == ("transfer", pytest.approx(1.8, rel=0.02))


@pytest.mark.parametrize(
    ("other", "lost_ms"),
    [
        ("nvjet_sm90_tst_192x192_64x3_1x2_h_bz_coopB_NTN", [7.0]),
        ("cutlass_80_tensorop_f16_s16816gemm_f16_128x128", [7.0]),
        ("ampere_bf16_sgemm_bf16_128x64_tn", [7.0]),
        ("gemv2T_kernel_val", []),
        ("splitKreduce_kernel", []),
        ("cutlass_80_tensorop_s1688gemm_128x256", []),
        ("nvjet_sm90_sss_128x128_32x6_2x1_v_bz_TNN", []),
        ("fmha_cutlassF_bf16_aligned_64x128_rf_sm80", []),
    ],
)
def test_products_in_fp32_are_a_loss_beside_others_in_a_lower_precision(other, lost_ms):
    """8 ms in a kernel without tensor cores; an eighth of it would do."""
    assert needless({"sm80_xmma_gemm_f32f32_f32f32_f32_nn": 8.0, other: 12.0}) == [
        ("fp32", ms) for ms in lost_ms
    ]


@pytest.mark.parametrize(("allowed", "device", "found"), [
    ("highest", "NVIDIA H100 80GB HBM3", True), ("high", "NVIDIA H100 80GB HBM3", False),
    ("highest", "Invented GPU", False),
])  # fmt: skip
def test_products_that_are_all_in_fp32_are_a_loss_where_tf32_is_there(allowed, device, found):
    """By the data sheet, 67 of 494.7 TFLOP/s."""
    record = SimpleNamespace(
        program={"modes": {"float32_matmul_precision": allowed}}, devices=[{"name": device}]
    )
    part = _tf32_as_fast(SimpleNamespace(noted=record))
    assert part == (pytest.approx(67 / 494.7, rel=0.02) if found else 0)


def test_copies_that_cudnn_puts_around_convolutions(monkeypatch):
    monkeypatch.setattr(kernels_by_name, "pieces_of_run", lambda judged: [])
    copies = {"nchwToNhwcKernel": 3.0, "nhwcToNchwKernel": 1.0}
    assert needless(copies) == [("channels", 4.0)]
    # Five passes of 0.5 ms would do for the gradient.
    norm = {"batch_norm_transform_input_kernel": 1.0, "batch_norm_backward_kernel": 10.0}
    assert needless(copies | norm) == [("channels", 4.0 + 7.5)]
    assert needless(norm) == []  # without convolutions nobody knows the layout


@pytest.mark.parametrize(
    ("text", "is_told"),
    [("nn.Conv1d(4, 8, 3)", False), ("nn.Conv1d(4, 8, 3), nn.Conv2d(4, 8, 3)", True), ("Model()", True)],
)
def test_convolutions_through_rows_have_no_channels_last(monkeypatch, text, is_told):
    monkeypatch.setattr(kernels_by_name, "pieces_of_run", lambda judged: [SimpleNamespace(text=text)])
    assert needless({"nchwToNhwcKernel": 3.0}) == [("channels", 3.0)] * is_told


def test_products_in_fp64_are_a_loss_beside_any_others():
    assert needless({"cutlass_80_tensorop_d884gemm_64x64": 8.0, "ampere_sgemm_128x64_nn": 12.0}) == [
        ("fp64", 4.0)
    ]
    assert needless({"cutlass_80_tensorop_d884gemm_64x64": 8.0}) == [("all_fp64", 4.0)]


@pytest.mark.parametrize(
    ("work", "dtype", "found"),
    [
        (WorkOfStep(flops=4e9, fp64=4e9), "float64", [12.0]),  # half of the 24 ms that are in passes
        # Small products take no longer than at 5 GFLOP/s, and what passes through memory at 4 GB/s.
        (WorkOfStep(flops=1e7, fp64=1e7, bytes=8e6), "float64", [(2.0 + 2.0) / 2]),
        (WorkOfStep(flops=4e9, fp64=3.8e9), "float64", [12.0]),
        (WorkOfStep(flops=4e9, fp64=2e9), "float64", []),  # which is told of that part
        (WorkOfStep(flops=4e9), "float32", []),
        (WorkOfStep(), "float64", [12.0]),  # nobody counted it: by its parameters
        (WorkOfStep(), "float32", []),
        (None, "float64", [12.0]),
    ],
)
def test_a_network_in_fp64_takes_twice_as_long_on_a_cpu(work, dtype, found):
    sizes = {"parameter_bytes": 8e6, "bytes_of_dtypes": {dtype: 8e6}}
    phases = {"phase:forward": 14.0, "phase:backward": 10.0}
    judged = SimpleNamespace(
        metrics={},
        noted=SimpleNamespace(
            work=work, devices=[], program={"optimizers": [sizes]}, command=["gone.py"], started_unix_ns=0
        ),
        mean_of_host=lambda name: phases.get(name.replace(PREFIX, "phase:")),
    )
    account = SimpleNamespace(
        on_device=False, mean_step_ms=40.0, cells={"compute": np.full((1, 20), 30.0)},
        step_ms=np.full((1, 20), 40.0),
    )  # fmt: skip
    findings = [one for one in _all_of_it(judged, account) if one.facts["op"] == "all_fp64"]
    assert [one.mean_ms for one in findings] == [pytest.approx(ms) for ms in found]


def needless(*args, **named):
    """(op, ms) of what is found of kernels by name, 10 of each, in a step whose compute is 30 ms."""
    return [
        (finding.facts["op"], pytest.approx(finding.mean_ms))
        for finding in needless_work(*on_device(*args, **named))
    ]


def on_device(kernels, work=None, peak=None, classes=None, shape=None, modes=None):
    """A run and its account."""
    values = {f"kernel_name_ms.{name}": np.full((1, 20), ms) for name, ms in kernels.items()}
    values |= {f"kernel_name_count.{name}": np.full((1, 20), 10.0) for name in kernels}
    values |= {
        name: np.full((1, 20), ms) for name, ms in {"kernel_ms.optimizer": 6.0, **(classes or {})}.items()
    }
    values |= {} if peak is None else {"peak_memory_bytes": np.full((1, 20), peak)}
    record = SimpleNamespace(
        work=work,
        devices=[{"kind": "cuda", "name": "NVIDIA H200", "memory_bytes": 80 << 30}],
        program={"optimizers": [{"parameter_bytes": 10.0, "odd_shape": shape}], "modes": modes},
        command=[],
        world_size=1,
    )
    judged = SimpleNamespace(
        metrics=values,
        noted=record,
        values=values.get,
        mean_of=lambda name: float(values[name].mean()),
    )
    cells = {"compute": np.full((1, 20), 30.0), "launch": np.full((1, 20), 3.0)}
    account = SimpleNamespace(
        on_device=True,
        mean_step_ms=40.0,
        cells=cells,
        mean_ms=lambda name: float(cells[name].mean()),
        share=lambda name: float(cells[name].mean()) / 40.0,
    )
    return judged, account


@pytest.mark.parametrize(
    ("num_sizes", "kernel", "is_told"),
    [
        pytest.param((10, 10), "cudnn_infer_wgrad2d", True, id="each-of-another-size"),
        pytest.param((5, 10), "cudnn_infer_wgrad2d", False, id="of-five-sizes"),
        pytest.param((3, 3), "cudnn_infer_wgrad2d", False, id="of-too-few-steps"),
        pytest.param((10, 10), "sm90_gemm", False, id="no-convolutions"),
    ],
)
def test_kernels_that_cudnn_tries_out_for_each_new_size(num_sizes, kernel, is_told):
    modes = {"slowed_by": {"cudnn_benchmark": ("/job/train.py", 7)}}
    noted = SimpleNamespace(work=WorkOfStep(num_sizes=num_sizes), program={"modes": modes})
    judged = SimpleNamespace(metrics={f"kernel_name_ms.{kernel}": None}, noted=noted, num_judged=20)
    account = SimpleNamespace(on_device=True, mean_ms=lambda *_: 0.0, mean_step_ms=40.0)
    found = [one.facts for one in _slowed(judged, account)]
    assert [(one["origin"], one["sizes"], one["at"].line) for one in found] == (
        [("cudnn_benchmark", "10", 7)] if is_told else []
    )


@pytest.mark.parametrize(
    ("num_sizes", "frame", "kind"),
    [
        pytest.param((10, 10), "main", "program_code", id="of-trials"),
        pytest.param((1, 10), "main", "memory", id="of-one-size"),
        pytest.param((10, 10), "empty_cache", "memory", id="the-program-empties-it"),
        pytest.param(None, "main", "program_code", id="of-a-process-that-was-ended"),
        pytest.param(None, "empty_cache", "memory", id="which-empties-it"),
    ],
)
def test_memory_that_is_given_back_is_of_the_kernels_that_cudnn_tries(tmp_path, num_sizes, frame, kind):
    modes = {"slowed_by": {"cudnn_benchmark": ("/job/train.py", 7)}}
    work = None if num_sizes is None else WorkOfStep(num_sizes=num_sizes)
    ended = None if work is None else 1
    noted = msgspec.structs.replace(
        run_record(2), work=work, program={"modes": modes}, finished_unix_ns=ended
    )

    def make(rank, step, noise):
        host, more = gives_memory_back(rank, step, noise)
        kernels = KernelSums(num_kernels=30, classes={}, top=[(0, 20.0, 30)])
        return host, more | {"kernels": kernels}

    folder = run_of(tmp_path / "run", make, noted, STEPS)
    for rank in (0, 1):
        write_json(folder / kernels_name(rank), KernelNames(names=["cudnn_infer_wgrad2d"]))
        write_stacks(folder, rank, COMMON, (frame, "rest", "runs", 0.5), steps=STEPS)
    found = causes(judge(load_run(folder, "run"), 1))
    (first,) = (one for one in found if one.ms == pytest.approx(6.0, rel=0.05))
    assert first.kind == kind
    if kind == "program_code":
        low, high = first.interval_ms
        assert low < 6.0 < high
        assert first.change.startswith("torch.backends.cudnn.benchmark = False")


def test_no_sentence_of_one_needless_work_is_said_of_another():
    """Each is told by facts that no other finding has."""
    facts = {
        "what": "7,419 small operators in a loop", "iterations": 96, "each_us": 4.0, "op": "recurrence",
    }  # fmt: skip
    finding = CauseFinding("compute", np.full(20, 9.0), {("compute",): 1.0}, facts=facts)
    account = SimpleNamespace(mean_step_ms=30.0, is_of_others=False)
    texts = fact_texts(finding, SimpleNamespace(ranks=[0]), account, "run") | {"line": "f(), train.py:5"}
    said = [text for evidence in rules()["compute"].evidence if (text := filled(evidence, texts))]
    assert [text.partition(" goes")[0] for text in said] == ["a loop"]


@pytest.mark.parametrize(
    ("precision", "types", "found"),
    [
        pytest.param("bf16", ["fp16"], [28.0 - 8.0], id="without-instructions"),
        pytest.param("fp16", [], [28.0 - 8.0], id="of-another-type"),
        pytest.param("bf16", ["bf16"], [], id="with-them"),
        pytest.param("bf16", None, [], id="nobody-knows"),
        pytest.param("fp32", [], [], id="fp32"),
    ],
)
def test_products_in_two_bytes_on_a_cpu_without_instructions_for_them(precision, types, found):
    """28 ms are computed; in fp32, 60 MFLOP on two cores take 3 ms, and 10 MB 5 ms."""
    work = WorkOfStep(flops=6e7, bytes=1e7, precision=precision)
    record = SimpleNamespace(work=work, program={"modes": {"cpu_multiplies": types, "num_threads": 2}})
    cells = {"compute": np.full((1, 20), 28.0)}
    steps = np.full((1, 20), 40.0)
    account = SimpleNamespace(on_device=False, mean_step_ms=40.0, cells=cells, step_ms=steps)
    findings = [*_emulated(SimpleNamespace(noted=record), account, work)]
    assert [one.mean_ms for one in findings] == [pytest.approx(ms) for ms in found]


@pytest.mark.parametrize(
    ("work", "peak", "found"),
    [
        (WorkOfStep(flops=4e9, again=1e9, again_at=LINE), 20 << 30, [("again", 6.0)]),
        (WorkOfStep(flops=4e9, again=1e9, again_at=LINE), 60 << 30, []),  # memory is short
        (WorkOfStep(flops=4e9, again=1e9, again_at=LINE), None, []),
        # The products, 20 ms, by FLOPs, and what is left of the 24 by bytes.
        (WorkOfStep(flops=4e9, again=1e9, bytes=10.0, again_bytes=5.0), 20 << 30, [("again", 7.0)]),
        (WorkOfStep(flops=4e9, unread=2e9, unread_at=LINE), None, [("unread", 12.0)]),
        (WorkOfStep(flops=4e9, unread=1e8, unread_at=LINE), None, []),  # too little to name
        # Of the 4 ms that are no products, and of both.
        (WorkOfStep(flops=4e9, bytes=10.0, scores_bytes=8.0), None, [("scores", 3.2)]),
        (WorkOfStep(flops=4e9, bytes=10.0, one_hot=1e9, one_hot_bytes=2.0), None, [("one_hot", 5.8)]),
        (WorkOfStep(flops=4e9, bytes=10.0, grown_bytes=8.0), None, [("grown", 3.2)]),
        (WorkOfStep(flops=4e9, bytes=10.0, zeros=1e9), None, [("zeros", 5.0)]),
        (WorkOfStep(flops=4e9, bytes=10.0, unused=1e9), None, [("unused", 6.0)]),
        (WorkOfStep(flops=4e9, bytes=10.0, masked=1e9), None, [("masked", 6.0)]),
        (WorkOfStep(flops=4e9, bytes=10.0, before=1e9), None, [("before", 4.8)]),
        (WorkOfStep(flops=4e9, bytes=10.0, merged=1e9), None, [("merged", 6.0)]),
        (WorkOfStep(flops=4e9, bytes=10.0, repeated=1e9, repeated_bytes=2.0), None, [("repeated", 5.8)]),
        (WorkOfStep(flops=4e9, bytes=10.0, spread=1e9), None, []),  # of CPUs alone
        (WorkOfStep(flops=4e9, bytes=10.0, unfolded=1e9), None, []),
        (WorkOfStep(flops=4e9, bytes=10.0, hoisted_bytes=5.0), None, [("hoisted", 2.0)]),
        (WorkOfStep(flops=4e9, bytes=10.0, backwards=1e9), None, [("backwards", 4.8)]),
        # Of 24 ms, or of what the step's own FLOPs and as many beside them take.
        (WorkOfStep(flops=4e9, bytes=10.0, discarded=1e9), None, [("discarded", 6.0)]),
        (WorkOfStep(flops=4e9, bytes=10.0, discarded=1e9, discarded_beside=1e9), None, [("discarded", 4.8)]),
        (WorkOfStep(flops=4e9, bytes=10.0, unchanged=1e9, unchanged_bytes=2.0), None, [("unchanged", 5.8)]),
        # Written, and of the optimizer's 6 ms the part of its parameters.
        (WorkOfStep(flops=4e9, bytes=10.0, rows_bytes=5.0), None, [("rows", 5.0)]),
        # A fifth of what the step takes with it; padding of all rows, of some, and of so little.
        (WorkOfStep(flops=4e9, bytes=8.0, twice=1e9, twice_bytes=2.0), None, [("twice", 4.8)]),
        (WorkOfStep(flops=4e9, padding=0.4, padding_columns=0.25), None, [("padding", 6.0)]),
        (WorkOfStep(flops=4e9, padding=0.5, padding_columns=0.1), None, [("lengths", 12.0)]),
        (WorkOfStep(flops=4e9, padding=0.2), None, []),
        (WorkOfStep(), None, []),
    ],
)
def test_work_that_is_done_twice_or_for_nobody_takes_its_part_of_the_kernels(work, peak, found):
    """Of 24 ms: 30 without the optimizer's."""
    assert needless({}, work, peak, {"kernel_ms.gemm": 20.0}) == found


@pytest.mark.parametrize(
    ("repeated", "found"),
    [
        # A quarter of 20 ms and half of 4; a third of the 3 ms that the device waits for launches.
        pytest.param(1e9, [("repeated", 8.0), ("handed", 3.0)], id="told"),
        pytest.param(0.0, [("handed", 4.0)], id="none"),
    ],
)
def test_what_goes_with_a_repetition_is_not_told_as_handed_on_too(repeated, found):
    """All of 4 ms are handed on, a quarter of it in calls that are repeated."""
    line = LineOfWork(
        at=LINE, operators=20, flops=0.0, bytes=8e9, forward_flops=0.0, forward_bytes=4e9,
        handed_bytes=4e9, handed_again_bytes=1e9,
    )  # fmt: skip
    again = {"repeated": repeated, "repeated_bytes": 4 * repeated, "repeated_launched": 1 / 3}
    work = WorkOfStep(flops=4e9, bytes=8e9, lines=[line], **again if repeated else {})
    assert needless({}, work, None, {"kernel_ms.gemm": 20.0}) == found


def test_padding_takes_of_kernels_of_attention_its_square():
    """Of 24 ms, half of them attention: a quarter of columns is a quarter of the others, 0.4375 of these."""
    work = WorkOfStep(flops=4e9, padding=0.4, padding_columns=0.25)
    assert needless({}, work, None, {"kernel_ms.attention": 12.0}) == [("padding", 8.25)]


@pytest.mark.parametrize(
    ("work", "kernels", "found"),
    [
        # Three quarters of 8 ms, and 2 of its bytes; a third of the 3 ms that the device waits for launches.
        pytest.param(
            {"hoisted_solves": 0.75, "hoisted_launched": 1 / 3}, True, [("hoisted", 9.0)], id="both"
        ),
        # Or three quarters of these, where the host reads an error code of each.
        pytest.param({"hoisted_solves": 0.75, "hoisted_checks": 0.75}, True, [("hoisted", 10.25)], id="read"),
        pytest.param({"hoisted_solves": 0.75}, False, [("hoisted", 2.0)], id="other-kernels"),
        pytest.param({}, True, [("hoisted", 2.0)], id="solves-of-data"),
    ],
)
def test_weights_that_are_solved_for_again_take_the_kernels_of_solves(work, kernels, found):
    """Nobody counts the FLOPs of solves, and their bytes tell nothing."""
    named = {"getrf_pivot": 6.0, "kernel_trsm_l_mul32": 2.0} if kernels else {"vectorized_elementwise": 8.0}
    of_step = WorkOfStep(flops=4e9, bytes=10.0, hoisted_bytes=5.0, **work)
    assert needless(named, of_step, None, {"kernel_ms.gemm": 20.0}) == found


@pytest.mark.parametrize(
    ("fills_ms", "found_ms"),
    [
        pytest.param(1.0, 2.0 + 6.0, id="one-lookup"),
        # 3 fills, and two additions that take three times as long as a fill each.
        pytest.param(3.3, 3.3 + 2 * 3 * 1.1 + 6.0, id="three-lookups"),
    ],
)
def test_gradients_of_a_table_are_filled_and_added_for_each_lookup(fills_ms, found_ms):
    """4.8 GB at 4.8 TB/s: 1 ms for each. One writes 2 ms by its bytes; the optimizer takes 6."""
    fill, add = (f"vectorized_elementwise_kernel ({name})" for name in ("FillFunctor", "CUDAFunctor_add"))
    kernels = {fill: fills_ms, add: 7.0}
    work = WorkOfStep(flops=4e9, bytes=9.6e9, rows_bytes=4.8e9)
    assert needless(kernels, work, classes={"kernel_ms.gemm": 20.0}) == [("rows", found_ms)]


@pytest.mark.parametrize(("odd", "num", "found"), [(4e9, 10, [("odd", 8.0)]), (8e9, 10, []), (4e9, 5, [])],
                         ids=["slow", "as-fast-as-others", "in-kernels-of-others"])  # fmt: skip
def test_products_with_odd_rows_take_longer_than_at_the_rate_of_others(odd, num, found):
    """Of 12 GFLOP in 20 ms: 12 ms in the longest kernel, of 10 launches; 8 GFLOP in 8 ms of others."""
    longest = "cutlass_80_tensorop_bf16_s16816gemm_bf16"
    kernels, classes = {longest: 12.0, "nvjet_sm90_tst": 8.0}, {"kernel_ms.gemm": 20.0}
    work = WorkOfStep(flops=12e9, odd=odd, odd_num=num, odd_length=1001, odd_at=LINE)
    assert needless(kernels, work, classes=classes) == found


@pytest.mark.parametrize(
    ("kernel", "found"),
    [
        pytest.param("cutlass_75_tensorop_bf16_s1688gemm_bf16_128x128_tn_align1", 1 - 1 / 6.3, id="2-bytes"),
        pytest.param("cutlass_80_tensorop_bf16_s16816gemm_bf16_256x128_tn_align2", 1 - 1 / 3, id="4-bytes"),
        pytest.param("cutlass_80_tensorop_s1688gemm_128x64_tn_align2", 1 - 1 / 2.4, id="of-TF32"),
        pytest.param("cutlass_80_tensorop_s1688gemm_128x64_tn_align4", None, id="as-TF32-wants-it"),
        pytest.param("cutlass_80_tensorop_bf16_s16816gemm_bf16_256x128_tn_align8", None, id="16-bytes"),
        pytest.param("cutlass_80_simt_sgemm_128x64_8x5_nt_align1", None, id="not-of-tensor-cores"),
        pytest.param("cutlass_tensorop_bf16_s16816fprop_analytic_bf16_nhwc_align1", None, id="a-convolution"),
    ],
)
def test_kernels_for_rows_that_begin_anywhere_are_known_by_name(kernel, found):
    """Those of two bytes take 6.3 or 3 times as long as others, those of TF32 2.4 times."""
    kernels = {f"Kernel2 ({kernel})": 18.0, "nvjet_sm90_tst": 2.0}
    of_it = [] if found is None else [("odd", pytest.approx(18 * found))]
    assert [one for one in needless(kernels) if one[0] == "odd"] == of_it


def of_odd_rows(tmp_path, others=0, **record):
    """The cause of a run whose optimizer has a matrix of 50,257 rows, and others beside it."""
    kernel = "cutlass_75_tensorop_bf16_s1688gemm_bf16_128x128_tn_align1"
    sums = KernelSums(num_kernels=3, classes={"gemm": (27.0, 3)}, top=[(1, 27.0, 3)])
    optimizer = {"kind": "AdamW", "odd_shape": [50257, 64], "parameter_bytes": 4 * 50257 * 64 + others}
    folder = run_of(
        tmp_path / "run",
        lambda rank, step, noise: (usual(noise), KERNELS | {"kernels": sums}),
        run_record(2, program={"optimizers": [optimizer]}, **record),
    )
    for rank in (0, 1):
        write_json(folder / kernels_name(rank), KernelNames(names=["", kernel]))
    (cause,) = (one for one in causes(judge(load_run(folder, "run"), 1)) if one.kind == "compute")
    return cause


@pytest.mark.parametrize("others", [0, 10**9], ids=["large", "too-small-to-take-long"])
def test_the_matrix_with_rows_that_begin_anywhere_is_known_from_the_optimizer(tmp_path, others):
    cause = of_odd_rows(tmp_path, others)
    if others:
        assert cause.subject == "3 products with rows that begin anywhere"
        assert cause.change.startswith("make the dimensions of what is multiplied multiples of 64")
        return
    assert cause.subject == "3 products with rows of 50,257 elements"
    assert cause.ms == pytest.approx(27 * (1 - 1 / 6.3), rel=0.01)
    assert "make 50,257 a multiple of 64, 50,304" in cause.change
    assert "of the matrices that are trained, one of 50,257 x 64 is the largest with such a dimension" in (
        cause.evidence
    )


@pytest.mark.parametrize(
    ("source", "told"),
    [
        pytest.param("class Words:\n    size: int = 50257\n", "Words(), train.py:2", id="a-field"),
        pytest.param("WORDS, WIDTH = 50_257, 768\n", "train.py:1", id="with-underscores"),
        pytest.param("net = Model(Config(words=50257))\n", "train.py:1", id="an-argument"),
        pytest.param("\nnet = Model(Config(words=len(words)))\n", "train.py:2", id="no-number"),
        pytest.param("net = Model(len(words), most=502570, rate=0.50257)\n", "", id="other-numbers"),
        pytest.param("a = 50257\nb = 50257\nc = 50257\nd = 50257\n", "", id="in-many-lines"),
    ],
)  # fmt: skip
def test_odd_rows_are_told_with_the_line_that_has_their_number(tmp_path, source, told):
    """Or else with the one that makes the model's configuration."""
    (tmp_path / "train.py").write_text(source)
    cause = of_odd_rows(tmp_path, command=[str(tmp_path / "train.py")], started_unix_ns=2**62)
    assert cause.subject.partition(" in ")[2] == told
    assert cause.change.partition("): at ")[2] == told


@pytest.mark.parametrize(
    ("other", "op"),
    [("ampere_sgemm_128x64_nn", "convs_fp32"), ("cutlass_tensorop_s1688fprop_optimized_tf32", "all_fp32")],
)
def test_convolutions_in_fp32_have_a_switch_of_their_own(monkeypatch, other, op):
    """7 of 8 parts go; not where some are in TF32, which cuDNN was allowed then."""
    monkeypatch.setattr(kernels_by_name, "_tf32_as_fast", lambda judged: 1 / 8)
    kernels = {"sm80_xmma_fprop_implicit_gemm_f32f32_f32f32_f32_nhwckrsc": 16.0, other: 4.0}
    ((found, ms),) = needless(kernels)
    assert (found, ms) == (op, pytest.approx((20.0 if other.endswith("nn") else 16.0) * 7 / 8))


@pytest.mark.parametrize(
    ("copies", "convolution", "ms", "most_ms"),
    [
        pytest.param(4, "sm90_xmma_fprop_nhwc", 9.0, 9.0 + 2.0, id="put-back"),
        pytest.param(1, "sm90_xmma_fprop_nhwc", 5.4, 9.0 + 2.0, id="some-are-of-others"),
        pytest.param(6, "sm90_xmma_fprop_nhwc", 5.4, 5.4, id="no-more-than-asked-for"),
        pytest.param(4, "sm90_xmma_fprop_nchw", 3.6, 3.6, id="no-convolutions-in-channels-last"),
    ],
)
def test_copies_into_another_layout_are_put_back_before_convolutions(copies, convolution, ms, most_ms):
    """Of 10 copies that take 9 ms 4 are asked for; 2 ms more go through tensors of unlike strides."""
    kernels = {"elementwise_kernel (direct_copy_kernel_cuda)": 9.0, "elementwise_kernel (BinaryFunctor)": 2.0}
    work = WorkOfStep(copies=copies, copies_at=LINE)
    (finding,) = needless_work(*on_device({**kernels, convolution: 5.0}, work))
    assert (finding.facts["op"], finding.mean_ms) == ("layout", pytest.approx(ms))
    assert finding.mean_ms + finding.more_ms == pytest.approx(most_ms)
    assert finding.mean_ms * finding.facts.get("least_part", 1.0) == pytest.approx(0.9 * copies)


@pytest.mark.parametrize("kernel", ["multi_bluestein_fft", "prime_fft_factor", "regular_fft_factor"])
def test_kernels_of_transforms_by_a_large_prime(kernel):
    """With 0.75 to 1.2 of them goes what is beside them."""
    found = (
        [] if kernel.startswith("regular") else [("transforms", pytest.approx(10.0 * math.sqrt(0.75 * 1.2)))]
    )
    assert needless({kernel: 10.0, "postprocess_kernel": 3.0}) == found


@pytest.mark.parametrize(
    ("model_bytes", "most_ms"),
    [pytest.param(20e9, 12.0 - (20 + 2.5) / RATE, id="counted"), pytest.param(0.0, None, id="not-counted"),
     pytest.param(60e9, None, id="the-rest-is-the-model's")],
)  # fmt: skip
def test_a_loss_by_hand_takes_what_it_moves_to_what_the_model_leaves_of_such_kernels(model_bytes, most_ms):
    """12 GB that one function makes 4."""
    loop = LossLoop(operators=12, ms=None, bytes=12e9, least_bytes=4e9)
    classes = {"kernel_ms.elementwise": 9.0, "kernel_ms.copy": 1.0, "kernel_ms.normalization": 2.0}
    judged, account = on_device({}, WorkOfStep(bytes=model_bytes), classes=classes)
    judged.noted.loss_loop = loop
    (finding,) = loss_loop(judged, account)
    least_ms = 8 / RATE
    assert finding.mean_ms == pytest.approx(math.sqrt(least_ms * (most_ms or least_ms)))
    assert finding.facts.get("is_least", False) == (most_ms is None)
    assert finding.mean_ms + finding.more_ms == pytest.approx(most_ms or least_ms)


@pytest.mark.parametrize(("idle_ms", "is_told"), [(1.0, False), (8.0, True)], ids=["busy", "it-idles"])
def test_what_a_host_does_beside_a_busy_device_takes_nothing_of_the_step(
    tmp_path, monkeypatch, idle_ms, is_told
):
    rows = [SimpleNamespace(phase=name, ms=ms, share=ms / 40, title=name, place="") for name, ms in HOST]
    monkeypatch.setattr(text_module, "largest_beside_the_model", lambda judged: rows[1])
    monkeypatch.setattr(text_module, "phases_of", lambda judged: rows)

    def make(rank, step, noise):
        return Host().idle(idle_ms).work((39.0 - idle_ms) * noise.gauss(1, 0.01)).comm(1.0), KERNELS

    single = dataset("run", [judge(load_run(run_of(tmp_path / "run", make), "run"))])
    told = nothing_text(single, found_causes(single.first))
    assert ("rest takes 30 % of the step" in told) == is_told


def test_convolutions_that_copy_their_inputs_into_columns():
    """All of the copies, and 0.7 of the products."""
    kernels = {"im2col_kernel": 5.0, "col2im_batched_kernel": 3.0, "nvjet_sm90_tst": 6.0}
    assert needless(kernels, classes={"kernel_ms.gemm": 6.0}) == [("columns", pytest.approx(8.0 + 4.2))]


@pytest.mark.parametrize(
    ("kernel", "ms", "peak", "added", "is_told"),
    [
        pytest.param("indexing_backward_kernel_small_stride", 12.0, 1e9, 0, True, id="few-rows-many-times"),
        pytest.param("indexing_backward_kernel_stride_1", 12.0, 8e9, 0, False, id="may-be-many-rows"),
        pytest.param("indexing_backward_kernel", 12.0, None, 0, False, id="nobody-knows-how-many"),
        pytest.param("indexing_backward_kernel", 12.0, 8e9, 25e7, True, id="few-as-counted"),
        pytest.param("indexing_backward_kernel", 12.0, 8e9, 5e9, False, id="many-as-counted"),
        pytest.param("indexing_backward_kernel_stride_1", 12.0, 8e9, 25e7, False, id="narrow-rows-take-long"),
        pytest.param("embedding_backward_feature_kernel", 12.0, 1e9, 0, False, id="an-embedding"),
    ],
)
def test_rows_that_many_indices_share_are_told_where_their_bytes_take_no_time(
    kernel, ms, peak, added, is_told
):
    """Ten calls, on a device that moves 4 TB/s or so; of those counted, added bytes are put."""
    found = needless({kernel: ms}, peak=peak, work=WorkOfStep(indexed_bytes=added))
    assert found == ([("shared", pytest.approx(ms))] if is_told else [])


FILL, ORDERED, SORT = (
    "vectorized_elementwise_kernel (FillFunctor)",
    "indexing_backward_kernel",
    "DeviceRadixSortOnesweepKernel",
)
CONV = "sm90_xmma_wgrad_implicit_gemm_bf16"
IN_ORDER = {"deterministic": ["/job/train.py", 7], "filled": None}


@pytest.mark.parametrize(
    ("slowed_by", "kernels", "limit", "ms"),
    [
        pytest.param(IN_ORDER, {ORDERED: 9.0, SORT: 2.0, FILL: 3.0}, "at most", 14.0, id="sums-and-fills"),
        pytest.param({"deterministic": None}, {ORDERED: 9.0, FILL: 8.0}, "at most", 9.0, id="nothing-filled"),
        pytest.param(IN_ORDER, {ORDERED: 9.0, CONV: 10.0}, "at most", 9.0, id="convolutions-are-as-fast"),
        pytest.param(IN_ORDER, {FILL: 2.0, CONV: 14.0}, None, None, id="too-little"),
        pytest.param({}, {ORDERED: 9.0, SORT: 2.0, FILL: 3.0, CONV: 14.0}, None, None, id="not-asked-for"),
    ],
)
def test_deterministic_algorithms_cost_at_most_their_kernels(tmp_path, slowed_by, kernels, limit, ms):
    top = [(place, ms, 10) for place, ms in enumerate(kernels.values())]
    sums = KernelSums(num_kernels=90, classes={"elementwise": (30.0, 90)}, top=top)

    def make(rank, step, noise):
        return Host().work(39.5 * noise.gauss(1, 0.01)).comm(0.5), used(45.0) | {"kernels": sums}

    run = run_record(2, program={"modes": {"slowed_by": slowed_by}})
    folder = run_of(tmp_path / "run", make, run, steps=STEPS)
    for rank in (0, 1):
        write_json(folder / kernels_name(rank), KernelNames(names=[*kernels]))
    found = [one for one in causes(judge(load_run(folder, "run"), 1)) if one.origin == "deterministic"]
    assert [(one.limit, one.ms) for one in found] == (
        [] if ms is None else [(limit, pytest.approx(ms, rel=0.02))]
    )
    for one in found:
        assert one.change.startswith("torch.use_deterministic")
        assert (one.line is not None) == (slowed_by.get("deterministic") is not None)
        assert one.interval_ms is None


@pytest.mark.parametrize(
    ("ordered", "indexed", "ms"),
    [
        pytest.param(6e6, 2e6, 9.0, id="three-quarters"),
        pytest.param(0.0, 2e6, None, id="nothing"),
        pytest.param(0.0, 0.0, 12.0, id="nobody-knows"),
    ],
)
def test_backward_passes_of_table_index_are_no_cost_of_deterministic_algorithms(
    monkeypatch, ordered, indexed, ms
):
    """Of 12 ms of kernels that add in an order, of a step of 40 ms."""
    monkeypatch.setattr(kernels_by_name, "pieces_of_run", lambda judged: [])
    work = WorkOfStep(ordered_bytes=ordered, indexed_bytes=indexed, ordered_at=LINE)
    found = needless({ORDERED: 10.0, SORT: 2.0}, work=work, modes={"slowed_by": IN_ORDER})
    assert found == ([] if ms is None else [("deterministic", pytest.approx(ms))])


@pytest.mark.parametrize(
    ("frame", "remedy"), [("packs", "leave save_on_cpu() out"), ("model", "let what needs")]
)
def test_copies_of_save_on_cpu_have_a_remedy_of_their_own(tmp_path, frame, remedy):
    sums = KernelSums(num_kernels=1, classes={"gemm": (28.0, 1)}, copies={"device_to_pageable": 12.0})

    def make(rank, step, noise):
        host = Host().work(28.0 * noise.gauss(1, 0.01)).comm(2.0)
        host.spans.append(Span(host.at, host.at + 12.0, Kind.COPY))
        host.at += 12.0
        return host, KERNELS | {"kernels": sums}

    folder = run_of(tmp_path / "run", make, steps=STEPS)
    for rank in (0, 1):
        write_stacks(folder, rank, (frame, "forward", "runs", 12.0), COMMON, steps=STEPS)
    (found,) = (one for one in causes(judge(load_run(folder, "run"), 1)) if one.kind == "copy")
    assert found.change.startswith(remedy)
    if frame == "packs":
        assert found.line.text == "Net.forward(), train.py:40"


def test_copies_into_another_layout_are_those_that_the_program_asks_for():
    """Of 10 kernels and 8 ms a half; ATen's kernels for another type have another name."""
    kernels = {"elementwise_kernel (direct_copy_kernel_cuda)": 8.0}
    assert needless(kernels, WorkOfStep(copies=5, copies_at=LINE)) == [("layout", 4.0)]
    assert needless(kernels, WorkOfStep()) == []
    assert needless({f"unrolled_{name}": ms for name, ms in kernels.items()}, WorkOfStep(copies=5)) == []


def test_batches_of_unlike_sizes_make_ranks_wait_for_each_other_in_turn(tmp_path):
    """One rank computes 36 ms, the other 24, as chance deals batches: 6 ms are lost, and 12 waited."""

    def make(rank, step, noise):
        is_longer = (step * step % 13 < 10) == (rank == 0)  # rank 0 in 9 of 13, without a short period
        host = Host().work(36.0) if is_longer else Host().work(24.0)
        return host.comm(2.0 if is_longer else 14.0), KERNELS | {"tokens": None}

    found = named(tmp_path / "run", make, run=run_record(2, not_measured={"tokens": UNLIKE}))
    found = [cause for cause in found if cause.kind == "imbalance"]
    assert [(cause.rank, cause.ms) for cause in found] == [(None, pytest.approx(6.0, rel=0.02))]
    assert found[0].subject == "unequal work, more of it on different ranks in turn"
    assert all(cause.kind != "imbalance" for cause in named(tmp_path / "alike", make))


@pytest.mark.parametrize(
    ("waits", "num", "low", "high"),
    [
        pytest.param("as-long", 40, 1.0, 1.01, id="as-long"),
        pytest.param("twice-as-long", 40, 2.0, 2.01, id="twice-as-long"),
        pytest.param("by-chance", 40, -0.8, 0.8, id="by-chance"),
        pytest.param("as-long", 4, math.inf, math.inf, id="few-steps"),
    ],
)
def test_waits_follow_the_work_of_a_rank_or_something_else(waits, num, low, high):
    random = np.random.default_rng(3)
    work_ms, chance_ms = random.uniform(20.0, 40.0, (2, 2, num))
    by_work = np.maximum(work_ms - work_ms[::-1], 0.0)
    lost_ms = {"as-long": by_work, "twice-as-long": 2 * by_work, "by-chance": chance_ms}[waits]
    assert low <= follows(lost_ms, work_ms) <= high


def test_few_steps_with_batches_of_unlike_sizes_are_enough(tmp_path):
    """A rank computes 12 ms longer in nine of 23 steps, which chance put close together."""
    longer = (8, 10, 12, 15, 16, 17, 18, 19, 22)

    def make(rank, step, noise):
        is_longer = step in longer
        is_own = is_longer and rank == step % 2
        work, wait = 36.0 if is_own else 24.0 + 0.1 * (rank == step % 2), 12.0 * (is_longer and not is_own)
        return Host().work(work).comm(2.0 + wait), KERNELS | {"tokens": None}

    unlike = run_record(2, not_measured={"tokens": UNLIKE})
    found = [cause for cause in named(tmp_path / "run", make, 24, unlike) if cause.kind == "imbalance"]
    assert [cause.ms for cause in found] == [pytest.approx(6.0 * 9 / 23, rel=0.1)]


@pytest.mark.parametrize("is_unlike", [True, False])
def test_slow_steps_of_longer_batches_lose_nothing(is_unlike, tmp_path):
    def make(rank, step, noise):
        return usual(noise).idle(0.5, "optimizer").work(60.5 if step % 5 == 4 else 0.5), used(3.0)

    run = run_record(2, not_measured={"tokens": UNLIKE}) if is_unlike else None
    found = [cause for cause in named(tmp_path / "run", make, run=run) if "slow steps" in cause.subject]
    assert len(found) == (not is_unlike)


def test_ranks_whose_batches_are_long_together_are_in_step():
    """Other ranks' batches are not known by size; their compute tells it, but for noise."""
    lengths, others = np.tile([10.0, 20.0, 40.0], 8), np.tile([20.0, 40.0, 10.0], 8)
    noise = np.tile([1.0, -1.0], 12)
    assert in_step(np.array([lengths, lengths + 3])) == pytest.approx(1.0)
    assert in_step(np.array([lengths, lengths + noise])) > IN_STEP
    assert in_step(np.array([lengths, others])) < 0


@pytest.mark.parametrize(
    ("copies", "source", "remedy"),
    [
        pytest.param({"pageable_to_device": 8.0}, "memory of the host that is not pinned", "pin ", id="all"),
        pytest.param(
            {"device_to_pageable": 7.0, "pinned_to_device": 3.0}, "the device's memory", "let what", id="most"
        ),
        pytest.param({"device_to_pageable": 7.0, "pinned_to_device": 5.0}, None, "of copies", id="either"),
        pytest.param({}, None, "of copies", id="not-told"),
        pytest.param({"device_to_pinned": 0.01}, None, "leave out copies between", id="of-kernels"),
    ],
)
def test_copies_are_of_a_kind_where_half_of_the_loss_must_be_of_it(tmp_path, copies, source, remedy):
    """The device only copies for 8 ms: with 3 hidden at most, 5 are of the first kind, with 5 it is 3."""
    sums = KernelSums(num_kernels=1, classes={"gemm": (28.0, 1)}, top=[(1, 28.0, 1)], copies=copies)

    def make(rank, step, noise):
        host = usual(noise)
        host.spans.append(Span(host.at, host.at + 8.0, Kind.COPY))
        host.at += 8.0
        return host, KERNELS | {"kernels": sums}

    (found,) = (cause for cause in named(tmp_path / "run", make) if cause.kind == "copy")
    told = [text for text in found.evidence if text.startswith("copies from ")]
    assert [source in text for text in told] == ([True] if source else [])
    assert found.change.startswith(remedy)


@pytest.mark.parametrize(
    ("name", "sampled_ms", "lost_ms"),
    [
        pytest.param("sends", 18.0, 14.0, id="the-host-waits-for-what-is-queued"),
        pytest.param("sends", 7.0, 13.0, id="it-waits-for-less-than-the-device-idles"),
        pytest.param("fit", 18.0, 6.0, id="other-code-of-the-library"),
    ],
)
def test_a_library_s_copies_cost_what_the_device_idles_behind_their_waits(
    tmp_path, name, sampled_ms, lost_ms
):
    """It copies for 6 ms and idles for 8, while its host is in the line that calls the library's loop. As
    long as that is in a copy, so much further ahead of the device it would be without."""

    def make(rank, step, noise):
        host = Host().idle(8.0 * noise.gauss(1, 0.01)).work(26.0)
        host.spans.append(Span(host.at, host.at + 6.0, Kind.COPY))
        host.at += 6.0
        return host.comm(0.5), used(40.0)

    folder = run_of(tmp_path / "run", make, steps=STEPS)
    for rank in (0, 1):
        passes = ("norm", "forward", "runs", 12.0), ("backward", "backward", "runs", 28.5 - sampled_ms)
        write_stacks(folder, rank, (name, "rest", "runs", sampled_ms), *passes, steps=STEPS)
    (found,) = (one for one in causes(judge(load_run(folder, "run"), 1)) if one.kind == "copy")
    assert (found.ms, found.line.line) == (pytest.approx(lost_ms, rel=0.03), 20)


def test_the_device_copies_for_what_its_cell_has_and_not_for_what_samples_show_beside_it():
    """Of 18 ms 6 are idle time in the line that copies."""
    sampled_copy = CauseFinding("copy", np.full(20, 6.0), {("launch",): 1.0}, facts={"group": ()})
    of_cell = CauseFinding("copy", np.full(20, 12.0), {("copy",): 1.0}, facts={"part_ms": 12.0})
    (found,) = of_a_step._with_common([], [sampled_copy, of_cell])
    assert (found.mean_ms, found.facts["part_ms"]) == (18.0, 12.0)


def test_the_largest_call_is_that_of_all_that_are_told_together():
    calls = {
        "bucket 0: a": (5.0, 25 << 20, 4),
        "bucket 1: b": (4.0, 600 << 20, 4),
        "bucket 2: c": (3.0, 1, 4),
    }
    exposure = Exposure(
        by_call={("all_reduce", module, ""): call for module, call in calls.items()}, num_small={},
        queued_ms=0.0, queued_what="", held_back=(0.0, 0.0), small_launch_ms=0.0,
        example=None, num_updates=1, wide={}, units=None, unit_launch_ms=0.0,
    )  # fmt: skip
    facts = _largest(SimpleNamespace(), exposure, ["all_reduce"])
    assert (facts["what"], facts["calls"]) == (
        "all_reduce (most in bucket 0: a)", "12 calls, the largest of 600.0 MiB",
    )  # fmt: skip


def test_an_optimizer_takes_what_its_row_of_the_table_has():
    account = SimpleNamespace(mean_ms={"optimizer": 22.4}.__getitem__)
    parts = SimpleNamespace(is_unfused=True, account=account)
    facts = of_a_step._words("optimizer", parts, 10.0)
    assert (facts["op"], facts["optimizer_ms"]) == ("unfused", 22.4)


@pytest.mark.parametrize(("lines", "kept"), [((5, 5), {"synchronisation": 12.0}), ((5, 9), None)])
def test_a_line_that_copies_and_waits_for_it_is_one_loss(monkeypatch, lines, kept):
    at = dict(zip(("synchronisation", "copy"), lines, strict=True))
    monkeypatch.setattr(
        of_a_step, "line_of", lambda one, _: SimpleNamespace(file="train.py", line=at[one.kind])
    )
    ms = {"synchronisation": 9.0, "copy": 3.0}
    losses = [CauseFinding(kind, np.full(20, each), {(kind,): 1.0}) for kind, each in ms.items()]
    found = of_a_step._one_of_a_line(None, losses)
    assert {finding.kind: finding.mean_ms for finding in found} == (kept or ms)
    if kept:
        assert found[0].takes == {("synchronisation",): 0.75, ("copy",): 0.25}


UNSAMPLED = SimpleNamespace(whole=SimpleNamespace(ranks=[]))
"""A run without samples of its stacks."""
AT = CodeLine(
    file="f.py", line=5, function="f", text="f(), f.py:5", caller="", calls="", doing="runs", ms=1.0,
    part=1.0, num_samples=9,
)  # fmt: skip


@pytest.mark.parametrize(
    ("kinds", "taken", "told", "high", "bound"),
    [
        (("small_messages", "launch_bound"), "wait", "3.00 ms more may go with it: launch_bound", 9.0, 1.0),
        (("program_code", "pause"), "compute", "3.00 ms of it are pause", 6.0, 4.0),
        (("program_code", "pause"), "blocked", None, 6.0, 4.0),
        (("pause", "program_code"), "compute", "3.00 ms of it are program_code", 6.0, 4.0),
        (("pause", "program_code"), "blocked", None, 6.0, 4.0),
        (("launch_bound", "program_code"), "launch", None, 6.0, 4.0),
        (("checkpoint", "transfer"), "wait", "3.00 ms more may go with it: transfer", 9.0, 1.0),
        (("transfer", "transfer"), "transfer", None, 6.0, 4.0),
    ],
)
def test_what_two_causes_say_of_one_line_is_told_once(kinds, taken, told, high, bound):
    """What else is in the line of what a program does goes with it; not sleep, which is no part of code."""
    larger, smaller = (
        Cause(
            kind=kind, subject=kind, ms=ms, interval_ms=(2.0, 6.0), bound_ms=4.0, share=0.1, evidence=(),
            change="", check="", source="records", line=AT,
        )
        for kind, ms in zip(kinds, (5.0, 3.0), strict=True)
    )  # fmt: skip
    named = _once([(larger, {taken: 5.0}), (smaller, {taken: 3.0})], UNSAMPLED)
    assert len(named) == (1 if told else 2)
    assert named[0][0].evidence == ((told,) if told else ())
    assert (named[0][0].interval_ms[1], named[0][0].bound_ms) == (high, bound)
    assert named[0][1] == {taken: 8.0 if high == 9.0 else 5.0}


@pytest.mark.parametrize("origin", ["dealt", "python"])
def test_a_rank_that_hands_out_batches_is_waited_for_in_the_line_in_which_it_does(origin):
    code, late = (
        Cause(
            kind=kind, subject=kind, ms=ms, interval_ms=(2.0, 6.0), bound_ms=9.0, share=0.1, evidence=(),
            change=kind, check="", source="records", line=AT, rank=of, is_waited_for=of is not None,
            origin=origin,
        )
        for kind, ms, of in (("program_code", 5.0, None), ("late_rank", 3.0, 0))
    )  # fmt: skip
    (first, _), *others = _once([(code, {"launch": 5.0}), (late, {"wait": 3.0})], UNSAMPLED)
    assert (first.ms, len(others)) == ((8.0, 0) if origin == "dealt" else (5.0, 1))
    assert first.change == "program_code"


@pytest.mark.parametrize(("kind", "is_late", "is_one"), [
    ("between_steps", False, True), ("program_code", True, False), ("optimizer", False, False),
])  # fmt: skip
def test_messages_and_the_code_that_calls_for_them_are_one_loss(kind, is_late, is_one):
    """Of both together; at most what the larger one may have, or the other beside it: 11 of 15 ms."""
    messages, code = (
        Cause(
            kind=kind, subject=kind, ms=ms, interval_ms=(2.0, 6.0), bound_ms=9.0, share=0.1, evidence=(),
            change="", check="", source="records", line=line, is_waited_for=is_late,
        )
        for kind, ms, line in (
            ("transfer", 5.0, msgspec.structs.replace(AT, text="gather(), f.py:9", caller=AT.text)),
            (kind, 3.0, AT),
        )
    )  # fmt: skip
    (first, taken), *others = _once([(messages, {"transfer": 5.0}), (code, {"compute": 3.0})], UNSAMPLED)
    assert len(others) == (0 if is_one else 1)
    assert first.kind == "transfer"
    if is_one:
        assert (first.ms, first.interval_ms, first.bound_ms) == (8.0, (4.0, 11.0), 4.0)
        assert first.evidence == ("3.00 ms of it are between_steps",)
        assert taken == {"transfer": 5.0, "compute": 3.0}


def test_what_one_rank_is_waited_for_is_one_cause_with_the_remedy_of_what_is_known():
    late, loads = (
        Cause(
            kind=kind, subject=kind, ms=ms, interval_ms=None, bound_ms=None, share=0.1, evidence=(),
            change=kind, check="", source="records", rank=1, is_waited_for=True,
        )
        for kind, ms in (("late_rank", 5.0), ("data_loading", 3.0))
    )  # fmt: skip
    [(first, _)] = _once([(late, {}), (loads, {})], UNSAMPLED)
    assert (first.kind, first.ms, first.change) == ("late_rank", 8.0, "data_loading")


def two_causes(first, second):
    """Of 5 and 3 ms; what differs from one that all ranks lose."""
    rest = {
        "subject": "", "interval_ms": (2.0, 6.0), "bound_ms": 4.0, "share": 0.1, "evidence": (), "check": "",
        "source": "records", "change": "",
    }  # fmt: skip
    return Cause(ms=5.0, **(rest | first)), Cause(ms=3.0, **(rest | second))


LATE = {"kind": "late_rank", "subject": "waiting for rank 0", "rank": 0, "is_waited_for": True}
OF_ALL_STEPS = {"interval_ms": (2.0, 9.0), "bound_ms": None, "is_in_step": False}


@pytest.mark.parametrize(("larger", "takes", "row", "told"), [
    pytest.param({"kind": "checkpoint", **OF_ALL_STEPS}, {}, "checkpoint", "of it are", id="its-saving"),
    pytest.param({"kind": "synchronisation"}, {"launch": 3.5}, "launch", "more may go with it:", id="of-all"),
    pytest.param({"kind": "synchronisation"}, {"launch": 2.5}, "launch", None, id="more-than-all-lose"),
    pytest.param({"kind": "launch_bound"}, {"launch": 2.5}, "launch", None, id="its-host"),
    pytest.param({"kind": "compute"}, {"compute": 5.0}, "compute", None, id="its-device"),
    pytest.param({"kind": "checkpoint", "rank": 1}, {}, "checkpoint", None, id="another-rank"),
])  # fmt: skip
def test_a_rank_that_is_late_by_what_is_named_already_is_told_there(larger, takes, row, told):
    """Rank 0 is waited for 3 ms, of which two ranks have a half each: as waiting, and in this row."""
    larger, late = two_causes(larger, LATE)
    (first, taken), *others = _once([(larger, takes), (late, {"wait": 1.5, row: 1.5})], UNSAMPLED)
    assert len(others) == (0 if told else 1)
    assert first.evidence == ((f"3.00 ms {told} waiting for rank 0",) if told else ())
    assert first.ms == 5.0
    if told:
        assert taken == {"wait": 1.5, row: takes.get(row, 0.0) + 1.5}


@pytest.mark.parametrize(("held", "ms", "interval"), [
    pytest.param({"data": 0.5, "unrecorded": 2.5}, 8.0, (4.0, 14.0), id="all-of-it"),
    pytest.param({"unrecorded": 1.5}, 6.5, (3.0, 9.5), id="half-of-it"),
    pytest.param({}, 5.0, (2.0, 6.0), id="told-already"),
])  # fmt: skip
def test_a_loss_of_all_steps_adds_what_the_cells_hold_of_it(held, ms, interval):
    """5 ms of recorded steps, and 3 of all steps in the same line."""
    of_line = {"kind": "data_loading", "subject": "data loading", "line": AT}
    of_step, of_all = two_causes(of_line, of_line | OF_ALL_STEPS)
    of_step = msgspec.structs.replace(of_step, share=0.1)
    [(first, taken)] = _once([(of_step, {"data": 5.0}), (of_all, held)], UNSAMPLED)
    assert (first.ms, first.interval_ms, first.is_in_step) == (ms, interval, True)
    assert sum(taken.values()) == pytest.approx(first.ms)
    more = ms - 5.0
    where = "of it are data loading, as steps show that were not recorded"
    assert first.evidence == ((f"{more:.2f} ms {where}",) if more else ())


def test_a_risk_without_ms_adds_nothing_to_a_loss_of_all_steps():
    of_line = {"kind": "program_code", "subject": "own code", "line": AT}
    of_all, risk = two_causes(of_line | OF_ALL_STEPS, of_line)
    risk = msgspec.structs.replace(risk, ms=0.0, share=0.0, interval_ms=None, bound_ms=None)
    assert _once([(of_all, {"unrecorded": 5.0}), (risk, {})], UNSAMPLED) == [(of_all, {"unrecorded": 5.0})]


@pytest.mark.parametrize(("held", "ms"), [
    pytest.param({"data": 0.5, "unrecorded": 4.5}, 8.0, id="beside-it"),
    pytest.param({"unrecorded": 3.5}, 6.5, id="half-of-it"),
    pytest.param({}, 5.0, id="in-it"),
])  # fmt: skip
def test_a_smaller_loss_of_recorded_steps_adds_what_one_of_all_steps_has_not(held, ms):
    """3 ms of recorded steps, and 5 of all steps in the same line."""
    of_line = {"kind": "data_loading", "subject": "data loading", "line": AT}
    of_all, of_step = two_causes(of_line | OF_ALL_STEPS, of_line)
    [(first, _)] = _once([(of_all, held), (of_step, {"data": 3.0})], UNSAMPLED)
    assert (first.ms, first.is_in_step) == (ms, False)
    where = "of it are data loading, as steps show that were recorded"
    assert first.evidence == ((f"{ms - 5.0:.2f} ms {where}",) if ms > 5.0 else ())


@pytest.mark.parametrize("kind", ["between_steps", "small_messages"])
def test_an_evaluation_in_no_step_is_no_part_of_what_steps_lose_in_its_line(kind):
    in_no_step = {"kind": "between_steps", "subject": "evaluation", "line": AT} | OF_ALL_STEPS
    in_steps = {"kind": kind, "subject": "what steps lose", "line": AT, "origin": "results"}
    named = [(cause, {}) for cause in two_causes(in_steps, in_no_step)]
    assert [cause.ms for cause, _ in _once(named, UNSAMPLED)] == [5.0, 3.0]


@pytest.mark.parametrize(("loading", "num"), [
    pytest.param("workers", 1, id="more-workers"), pytest.param("", 2, id="whole-batches"),
])  # fmt: skip
def test_cores_that_idle_are_given_to_threads_or_to_workers(loading, num):
    threads = {"kind": "compute", "subject": "cores that idle", "origin": "threads"}
    loads = {"kind": "data_loading", "subject": "data loading", "origin": loading}
    for first, second in ((loads, threads), (threads, loads)):
        told = _once([(cause, {}) for cause in two_causes(first, second)], UNSAMPLED)
        assert len(told) == num
        assert told[0][0].interval_ms == (2.0, 6.0)
    if num == 1:
        assert told[0][0].evidence == (
            "3.00 ms of another loss would need the same cores, which can be had once: data loading",
        )


def test_what_one_rank_has_more_of_is_told_with_what_all_ranks_lose():
    of_all, of_one = (
        Cause(
            kind="copy", subject=f"copies on {who}", ms=ms, interval_ms=(ms - 1, ms + 2), bound_ms=20.0,
            share=ms / 40, evidence=(), change="pin it", check="", source="records", rank=rank,
            is_waited_for=rank is not None,
        )
        for who, rank, ms in (("all ranks", None, 18.0), ("rank 1", 1, 1.5))
    )  # fmt: skip
    [(first, taken)] = _once([(of_all, {"copy": 18.0}), (of_one, {"copy": 0.5, "wait": 1.0})], UNSAMPLED)
    assert (first.ms, first.interval_ms) == (19.5, (17.5, 21.5))
    assert first.evidence == ("1.50 ms of it are copies on rank 1",)
    assert taken == {"copy": 18.5, "wait": 1.0}


@pytest.mark.parametrize(
    ("host_ms", "origin", "is_first"), [(3.0, "launch", True), (1.0, "launch", False), (3.0, "dealt", False)]
)
def test_a_rank_that_launches_late_stands_behind_what_all_hosts_lose(host_ms, origin, is_first):
    late, host, other = (
        SimpleNamespace(kind=kind, ms=ms, is_waited_for=kind == "late_rank", origin=origin)
        for kind, ms in (("late_rank", 5.0), ("synchronisation", host_ms), ("transfer", 4.0))
    )
    named = sorted((late, host, other), key=lambda one: _place(one, [late, host, other]))
    assert (named.index(host) < named.index(late)) == is_first


@pytest.mark.parametrize(
    ("most_ms", "origin", "is_first"),
    [
        pytest.param(20.0, "accumulated", False, id="any"),
        pytest.param(9.0, "accumulated", True, id="less"),
        pytest.param(20.0, "bucket", True, id="needed"),
    ],
)
def test_launches_stand_behind_what_is_needless_where_either_may_be_larger(most_ms, origin, is_first):
    launches, transfer = (
        SimpleNamespace(kind=kind, ms=ms, interval_ms=interval, origin=origin)
        for kind, ms, interval in (("launch_bound", 30.0, (10.0, 50.0)), ("transfer", 8.0, (4.0, most_ms)))
    )
    named = sorted((launches, transfer), key=lambda one: _place(one, [launches, transfer]))
    assert (named[0] is launches) == is_first


@pytest.mark.parametrize(
    ("lead_ms", "passes", "num_models", "ms", "high_ms"),
    [
        pytest.param(50.0, 3, 1, 6.0, 9.0, id="behind-which-work-is-queued"),
        pytest.param(0.0, 3, 1, 6.9, 11.5, id="behind-which-nothing-is"),
        pytest.param(0.0, 3, 2, 6.9, 11.5, id="of-two-models-of-the-same-names"),
        pytest.param(0.0, 1, 1, None, None, id="once"),
    ],
)
def test_reductions_of_each_micro_batch_cost_what_delays_a_step_and_their_launches(
    tmp_path, lead_ms, passes, num_models, ms, high_ms
):
    """Ten buckets in each of three passes, of which 9 ms are exposed in all: 6 of these are needless. Where
    the host has launched nothing behind them, only the last one of 0.3 ms delays a step. 20 of them less
    spare the host as much as 40 kernels, and 40 copies of gradients into buckets and back as much as 24, of
    570 and 30 more, of which 60 copies count as 36: of the step of 60 ms 6.7."""
    sums = KernelSums(num_kernels=570, classes={"gemm": (21.0, 540), "communication": (9.0, 30)}, top=[])

    def make(rank, step, noise):
        host, idle_ms = Host(), 30.0 if lead_ms == 0 else 0.0
        for _ in range(passes):
            host.idle(idle_ms / passes).work((21 + 0.1 * math.sin(step)) / passes, "backward")
            for bucket in range(10):
                model, place = divmod(bucket, 10 // num_models)
                host.comm(0.9 / passes, size=8 << 20, module=place, lead=lead_ms, group=f"of {model}")
        modules = [f"bucket {bucket}: layers.{bucket}" for bucket in range(10)]
        return host.work(0.1, "optimizer"), used(45.0) | {"kernels": sums, "modules": modules}

    found = [cause for cause in named(tmp_path / "run", make) if cause.origin == "accumulated"]
    assert [cause.ms for cause in found] == ([] if ms is None else [pytest.approx(ms, rel=0.05)])
    for cause in found:
        assert cause.interval_ms[1] < high_ms
        assert any("needless ones" in text for text in cause.evidence) == (lead_ms == 0)
        assert any("5.80 ms more of their transfer" in text for text in cause.evidence) == (lead_ms == 0)


def test_an_interval_reaches_down_to_what_another_measure_tells():
    found, _ = Worth(10.0, (10.0, 10.0)).printed(100.0, 2.0, (0.65, 0.3), 0.5)
    assert found == pytest.approx((5.0 * np.exp(-0.65), 10.0 * np.exp(0.3) + 2.0))  # of 2 ms at most


def test_a_rank_that_is_late_by_longer_batches_is_one_cause():
    rest = {
        "subject": "",
        "interval_ms": None,
        "bound_ms": None,
        "share": 0.1,
        "check": "",
        "source": "records",
    }
    late, longer, other = (
        Cause(kind=kind, ms=ms, rank=rank, evidence=(kind,), change=kind, **rest)
        for kind, ms, rank in (("late_rank", 5.0, 1), ("imbalance", 3.0, 1), ("imbalance", 2.0, 0))
    )
    told = [cause for cause, _ in _once([(late, {}), (longer, {}), (other, {})], UNSAMPLED)]
    assert [(cause.kind, cause.rank, cause.change) for cause in told] == [
        ("late_rank", 1, "imbalance"),
        ("imbalance", 0, "imbalance"),
    ]
    assert told[0].evidence == ("late_rank", "imbalance")


@pytest.mark.parametrize(
    ("parameter_bytes", "is_told"), [(2 << 30, True), (40 << 30, False)], ids=["room", "no-room"]
)
def test_parameters_that_fsdp_keeps_on_the_cpu_are_told_to_stay_on_the_device(
    tmp_path, parameter_bytes, is_told
):
    """60 of 80 GiB are free on each of two ranks: a half takes four times 2 GiB, and not four times 40."""
    units = [{"kind": "fully_shard", "is_offloaded": True, "times": 6, "site": "train.py:9"}]
    optimizers = [{"kind": "AdamW", "fused": True, "parameter_bytes": parameter_bytes}]
    device = {"kind": "cuda", "name": "NVIDIA H200", "memory_bytes": 80 << 30}
    run = run_record(2, program={"units": units, "optimizers": optimizers}, devices=[device] * 2)

    def make(rank, step, noise):
        record = used(45.0) | sampled(used=20 << 30)
        return Host().work(20.0).idle(20.0 * noise.gauss(1, 0.01), "optimizer"), record

    cause = named(tmp_path / "run", make, run=run)[0]
    assert cause.kind == "optimizer"
    assert (
        cause.change.startswith("leave offload_policy out at train.py:9: of the device's memory 60.0 GiB")
        == is_told
    )
    assert any("state are on the CPU" in text for text in cause.evidence) == is_told


@pytest.mark.parametrize(("other_ms", "least"), [(1.0, 0.74), (8.0, 0.52)])
def test_a_host_that_is_late_elsewhere_too_may_fill_what_a_wait_leaves(tmp_path, other_ms, least):
    """8 ms of idle device behind waits; beside 1 ms of it for launches, and 8 ms, of steps of about 45 ms.

    With the error of 0.3 or 0.65 in the logarithm of what mending saves, times hardly differing.
    """

    def make(rank, step, noise):
        host = Host().idle(8.0 * noise.gauss(1, 0.001), "synchronisation").work(28.0)
        return host.idle(other_ms).work(1.0), used(45.0)

    (cause,) = (one for one in named(tmp_path / "run", make) if one.kind == "synchronisation")
    assert cause.ms == pytest.approx(8.0, rel=0.01)
    assert cause.interval_ms[0] == pytest.approx(least * cause.ms, rel=0.02)


def test_more_micro_batches_are_weighed_against_the_host(tmp_path):
    """The host runs for 35 of 60 ms: four times the launches would take longer than what the bubble does."""

    def stage(rank, step, noise):
        return Host().work(30.0 * noise.gauss(1, 0.01)).comm(30.0, op="recv", size=8), used(35.0)

    cause = named(tmp_path / "run", stage)[0]
    assert cause.kind == "bubble"
    assert re.search(r"cut from the same batch, leave about 7.[45]\d ms of it", cause.change)
    assert re.search(r"the host, which runs for 3\d.\d ms of a 6\d.\d ms step", cause.change)
    assert "of the same size" in cause.change
    assert cause.interval_ms[0] < 0.75 * cause.ms


@pytest.mark.parametrize(
    ("optimizer", "more_ms"),
    [
        pytest.param({"kind": "AdamW"}, 5.0, id="foreach"),
        pytest.param({"kind": "AdamW", "fused": True}, 0.0, id="fused"),
        pytest.param({"kind": "AdamW", "foreach": False}, 0.0, id="whose-kernels-are-unknown"),
        pytest.param({"kind": "Lion"}, 0.0, id="of-another"),
    ],
)
def test_kernels_of_an_optimizer_beyond_one_pass_over_its_memory(tmp_path, optimizer, more_ms):
    """7 passes over 0.6 * 4.8 TB/s / 7 * 5 ms of parameters take 5 of the 10 ms."""
    size = round(0.6 * 4.8e12 / 7 * 5e-3)
    sums = KernelSums(num_kernels=900, classes={"optimizer": (10.0, 900)}, top=[])

    def make(rank, step, noise):
        host = usual(noise).work(10.0, "optimizer", "AdamW", size)
        return host, KERNELS | {"kernels": sums}

    rows = [{"num_parameters": 9, "parameter_bytes": size} | optimizer]
    run = run_record(2, program={"optimizers": rows}, devices=[{"kind": "cuda", "name": "NVIDIA H200"}] * 2)
    found = [one for one in named(tmp_path / "run", make, run=run) if one.kind == "optimizer"]
    assert [one.ms for one in found] == ([pytest.approx(more_ms, rel=0.02)] if more_ms else [])
    assert all("fused=True" in one.change for one in found)
    assert all(one.subject == "optimizer that is not fused on all ranks" for one in found)


@pytest.mark.parametrize("is_view", [False, True])
def test_reductions_that_a_device_hides_may_cost_what_they_take_and_copy(tmp_path, is_view):
    """Of eleven buckets in each of three passes 6 ms lie under compute and 0.6 stick out: of the needless
    ones 4 and 0.4. Copies into buckets and back read and write 64 MiB four times for each of 22, unless
    gradients lie in buckets: 1.4 ms. None or all of that goes as well: half is told."""
    device = {"kind": "cuda", "name": "NVIDIA H200"}
    sums = KernelSums(num_kernels=570, classes={"gemm": (60.0, 540), "communication": (6.6, 33)}, top=[])

    def make(rank, step, noise):
        host = Host()
        for _ in range(3):
            for bucket in range(10):
                host.comm(0.2, size=64 << 20, module=bucket, lead=5.0, start=host.at + 1 + bucket)
            host.work(20.0 + 0.1 * math.sin(step), "backward").comm(0.2, size=64 << 20, module=10, lead=5.0)
        modules = [f"bucket {bucket}: layers.{bucket}" for bucket in range(11)]
        return host.work(0.1, "optimizer"), KERNELS | {"kernels": sums, "modules": modules}

    wrapper = {"parameter_bytes": 4, "bucket_cap_mb": 25.0, "gradient_as_bucket_view": is_view}
    run = run_record(2, program={"wrappers": [wrapper]}, devices=[device] * 2)
    (cause,) = [one for one in named(tmp_path / "run", make, run=run) if one.origin == "accumulated"]
    copied_ms = 0.0 if is_view else 4 * 22 * (64 << 20) / 4.3e9
    assert cause.ms == pytest.approx(0.4 + (4.0 + copied_ms) / 2, rel=0.05)
    assert cause.interval_ms[0] == pytest.approx(0.4, rel=0.1)
    assert 0.4 + max(4.0, copied_ms) < cause.interval_ms[1] < 0.4 + 1.5 * (4.0 + copied_ms)
    assert any("copies of gradients into buckets" in text for text in cause.evidence) != is_view
