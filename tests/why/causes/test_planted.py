"""The first cause of a run is the one that its numbers were made with; a run without any has none."""

import math
import random
import re
from types import SimpleNamespace
from unittest.mock import ANY

import pytest

from aorta.account.judge.judged import dataset, judge
from aorta.account.load.open import load_run
from aorta.records.schema import (
    CallsOfFewRows,
    DerivativeCalls,
    FourierTransforms,
    HostSpan,
    HostUse,
    LineOfWork,
    LossLoop,
    OperatorLoop,
    QuietCalls,
    WorkOfStep,
)
from aorta.records.stacks import StackFrame
from aorta.why.causes.losses import needless
from aorta.why.causes.rank import found_causes
from aorta.why.causes.rules import rules
from aorta.why.causes.source import Source
from aorta.why.causes.text import notes, nothing_text
from tests.records.run_folders import run_record
from tests.why.causes.runs import GPU_RUN, MIB, Host, causes, plain, run_of, sampled, slow_loader, waited
from tests.why.causes.stacks import COMMON, FRAMES, TRAIN, write_stacks


def found(folder, make, run=None):
    return causes(judge(load_run(run_of(folder, make, run), "run")))


def late(rank, step, noise):
    return waited(8.0, rank, step, noise)


def slow_loader_of_one(rank, step, noise):
    return waited(8.0, rank, step, noise, kind="data")


def loader_behind_the_body(rank, step, noise):
    return plain(noise).after(9.0, "data")


def unknown_between(rank, step, noise):
    return plain(noise).after(9.0)


def saves_sometimes(rank, step, noise):
    host = plain(noise)
    return host.work(60.0, "checkpoint") if step % 5 == 0 else host


def collects_sometimes(rank, step, noise):
    pause = 60.0 if step % 5 == 2 else 0.0
    return waited(pause, rank, step, noise, kind="garbage_collection") if pause else plain(noise)


def slow_optimizer(rank, step, noise):
    return plain(noise).work(12.0, "optimizer", "SGD", size=4 * MIB // 10)


def many_small(rank, step, noise):
    host = Host().work(30.0 * noise.gauss(1, 0.01))
    for _ in range(40):
        host.comm(0.3, size=1024)
    return host


def small_ahead(is_async):
    """20 calls beside which the program goes on, or for which it waits: 6 of 36 ms."""

    def make(rank, step, noise):
        host = Host().work(30.0 * noise.gauss(1, 0.01))
        for _ in range(20):
            host.comm(0.3, size=1024, is_async=is_async)
        return host

    return make


@pytest.mark.parametrize(("is_async", "kinds"), [(False, ["small_messages"]), (True, [])])
def test_small_calls_that_overlap_must_stick_out_by_more_on_a_cpu(tmp_path, is_async, kinds):
    assert [cause.kind for cause in found(tmp_path / "run", small_ahead(is_async))] == kinds


def many_barriers(rank, step, noise):
    host = Host().work(30.0 * noise.gauss(1, 0.01))
    for _ in range(40):
        host.comm(0.3, "barrier", size=0)
    return host


def unequal_stages(rank, step, noise):
    """Rank 1 computes 40 ms, rank 0 twenty; the rest of a step rank 0 waits in recv."""
    if rank == 1:
        return Host().comm(2.0, "recv", size=1024).work(40.0).comm(0.1, "send", size=1024)
    return Host().work(20.0).comm(0.1, "send", size=1024).comm(22.0, "recv", size=1024)


def bubble(rank, step, noise):
    """Equal stages, one after the other."""
    if rank == 1:
        return Host().comm(20.0, "recv", size=1024).work(20.0).comm(0.1, "send", size=1024)
    return Host().work(20.0).comm(0.1, "send", size=1024).comm(20.0, "recv", size=1024)


def bare_gathers(rank, step, noise):
    host = Host()
    for _ in range(4):
        host.comm(4.0, "all_gather").work(8.0 * noise.gauss(1, 0.01))
    return host


def half_hidden_gathers(lead):
    """Each starts 2 ms before the compute that should hide it ends, lead ms behind its launch."""

    def make(rank, step, noise):
        host = Host()
        for _ in range(4):
            host.work(8.0 * noise.gauss(1, 0.01))
            host.comm(4.0, "all_gather", is_async=True, start=host.at - 2.0, lead=lead).idle(2.0)
        return host

    return make


def small_bare_gathers(rank, step, noise):
    host = Host()
    for _ in range(20):
        host.comm(1.0, "all_gather", 64).work(3.0 * noise.gauss(1, 0.01)).comm(1.0, "reduce_scatter", 64)
    return host


def stands_behind(rank, step, noise):
    host = Host().work(20.0 * noise.gauss(1, 0.01))
    host.comm(9.0, size=64 * MIB, is_async=True, start=host.at)
    return host.comm(9.1, size=64).work(20.0)


def more_tokens(rank, step, noise):
    if rank == 1:
        return Host().work(20.0).comm(2.0, "all_to_all", 3 * MIB).work(20.0).comm(2.0, "all_to_all", 3 * MIB)
    return Host().work(20.0).comm(2.0, "all_to_all", MIB).work(10.0).comm(12.0, "all_to_all", MIB)


def bare_transfer(rank, step, noise):
    return plain(noise, comm=20.0)


def low_clock(rank, step, noise):
    is_low = rank == 1 and step > 8
    throttling = ["hw_thermal_slowdown"] if is_low else []
    host = plain(noise, compute=49.5 if is_low else 30.0)
    return host, sampled(clock=1200.0 if is_low else 1980.0, throttling=throttling)


def low_clock_without_loss(rank, step, noise):
    """A sample of another moment, or work that waits for memory: no step is longer."""
    return plain(noise), low_clock(rank, step, noise)[1]


def power_capped(rank, step, noise):
    """The work needs more power than the devices have, on all ranks alike."""
    low = step % 2 == rank % 2
    return plain(noise), sampled(clock=1350.0 if low else 1845.0, throttling=["sw_power_cap"])


def retries(rank, step, noise):
    host = plain(noise, compute=50.0 if step % 4 == 0 else 30.0)
    return host, sampled(retries=step // 4)


def nearly_full(rank, step, noise):
    return plain(noise), sampled(used=int(79.2 * 2**30))


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("make", "kind", "subject", "ms"),
    [
        pytest.param(late, "late_rank", "rank 1", 8.0, id="late-rank"),
        pytest.param(slow_loader_of_one, "data_loading", "rank 1", 8.0, id="loader-of-one-rank"),
        pytest.param(slow_loader, "data_loading", "all ranks", 9.0, id="loader-of-all"),
        pytest.param(loader_behind_the_body, "data_loading", "all ranks", 9.0, id="loader-between-steps"),
        pytest.param(unknown_between, "between_steps", "all ranks", 9.0, id="time-between-steps"),
        pytest.param(saves_sometimes, "checkpoint", "all ranks", 12.0, id="checkpoint"),
        pytest.param(collects_sometimes, "garbage_collection", "rank 1", 12.0, id="garbage"),
        pytest.param(slow_optimizer, "optimizer", "all ranks", 10.0, id="optimizer"),
        pytest.param(many_small, "small_messages", "all_reduce", 11.6, id="small-messages"),
        pytest.param(many_barriers, "small_messages", "barrier", 11.7, id="barriers"),
        pytest.param(unequal_stages, "late_rank", "rank 1", 10.0, id="unequal-stages"),
        pytest.param(bubble, "bubble", "neighbour", 20.0, id="bubble"),
        pytest.param(bare_gathers, "no_prefetch", "4 gathers", 12.0, id="no-prefetch"),
        pytest.param(stands_behind, "shared_communicator", "behind", 9.0, id="shared-communicator"),
        pytest.param(more_tokens, "imbalance", "rank 1", 10.0, id="unbalanced-experts"),
        pytest.param(bare_transfer, "transfer", "all_reduce", 20.0, id="transfer"),
    ],
)
def test_the_first_cause_is_the_planted_one_with_its_milliseconds(tmp_path, make, kind, subject, ms):
    first = found(tmp_path / "run", make)[0]
    assert first.kind == kind
    assert subject in first.subject
    assert first.ms == pytest.approx(ms, rel=0.25)
    assert first.evidence
    assert ("bytes.all_to_all by rank shows" in first.change) == (kind == "imbalance")
    assert first.check


@pytest.mark.parametrize(
    ("lead", "subject", "evidence", "change"),
    [
        pytest.param(
            8.0,
            "that compute keeps waiting",
            "4 of them are issued ahead",
            "set CUDA_DEVICE_MAX_CONNECTIONS=1 ",
        ),
        pytest.param(0.01, "without prefetch", "could hide it", "gather of the next layer"),
    ],
)
def test_gathers_that_are_issued_ahead_are_not_told_to_be(tmp_path, lead, subject, evidence, change):
    first = found(tmp_path / "run", half_hidden_gathers(lead))[0]
    assert first.kind == "no_prefetch"
    assert subject in first.subject
    assert evidence in " ".join(first.evidence)
    assert change in first.change


def test_merging_small_gathers_and_hiding_them_save_their_time_only_once(tmp_path):
    causes = found(tmp_path / "run", small_bare_gathers)
    small = [cause for cause in causes if cause.kind == "small_messages"]
    assert [cause.subject.split(": ")[1] for cause in small] == [
        "all_gather of 64 B each",
        "reduce_scatter of 64 B each",
    ]
    hiding_ms = sum(cause.ms for cause in causes if cause.kind == "no_prefetch")
    assert small[0].ms + hiding_ms <= 20 * 1.0  # 20 gathers of 1 ms, all exposed


@pytest.mark.heavy
@pytest.mark.parametrize("times", [1, 3])
def test_what_came_once_is_told_and_is_no_loss_of_each_step(tmp_path, times):
    """60 ms on rank 1, of 24 steps; the other one waits for it."""

    def make(rank, step, noise):
        is_there = step in (7, 12, 21)[:times]
        return waited(60.0, rank, step, noise, kind="garbage_collection") if is_there else plain(noise)

    told = found_causes(judge(load_run(run_of(tmp_path, make), "run")))
    assert [cause.rank for cause in told.listed] == [1] * (times > 1)
    assert [re.search("on rank 1: [56][0-9.]* ms in one of .* Once does not tell", text) is not None
            for text in told.no_loss] == [True] * (times == 1)  # fmt: skip
    # The transfer of each step alone is not explained.
    assert sum(told.unexplained_ms.values()) == pytest.approx(2.0, abs=0.1)


@pytest.mark.parametrize(
    ("make", "kind", "subject"),
    [
        pytest.param(low_clock, "clock", "rank 1", id="clock"),
        pytest.param(retries, "memory", "allocation retries", id="retries"),
        pytest.param(nearly_full, "memory", "nearly full", id="memory-limit"),
    ],
)
def test_telemetry_gives_causes(tmp_path, make, kind, subject):
    first = found(tmp_path / "run", make, GPU_RUN)[0]
    assert (first.kind, first.source) == (kind, "telemetry")
    assert subject in first.subject


@pytest.mark.heavy
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda rank, step, noise: plain(noise), id="little-exposed"),
        pytest.param(lambda rank, step, noise: plain(noise).work(0.5, "data"), id="quick-loader"),
        pytest.param(
            lambda rank, step, noise: waited(noise.uniform(0, 3), rank, step, noise, step % 2),
            id="ranks-late-in-turn",
        ),
        pytest.param(
            lambda rank, step, noise: (plain(noise), sampled(clock=1980 - 20 * rank)), id="clocks-vary"
        ),
        pytest.param(low_clock_without_loss, id="low-clock-without-loss"),
        pytest.param(power_capped, id="power-of-all-ranks"),
    ],
)
def test_a_run_without_a_cause_has_none(tmp_path, make):
    assert found(tmp_path / "run", make, GPU_RUN) == []


@pytest.mark.heavy
def test_no_millisecond_is_in_two_causes(tmp_path):
    """A slow loader of one rank, small messages and a time between steps, all in one run."""

    def make(rank, step, noise):
        late_ms = 6.0 if rank == 1 else 0.0
        host = Host().work(late_ms + 1e-3, "data").work(20.0).comm(0.3 + 6.0 - late_ms, size=1024)
        for _ in range(30):
            host.comm(0.3, size=1024)
        return host.after(7.0)

    run = judge(load_run(run_of(tmp_path / "run", make), "run"))
    seen = causes(run)
    assert {one.kind for one in seen} == {"data_loading", "small_messages", "between_steps"}
    step = run.statistics["step_ms"].median
    assert sum(one.ms for one in seen) <= step - 20.0 + 0.5
    assert [one.ms for one in seen] == sorted((one.ms for one in seen), reverse=True)


@pytest.mark.heavy
def test_an_old_run_without_host_spans_still_names_the_late_rank(tmp_path):
    def make(rank, step, noise):
        return late(rank, step, noise), {"host_spans": None}

    assert found(tmp_path / "run", make)[0].kind == "late_rank"


def test_a_cause_of_few_steps_says_that_there_is_no_interval(tmp_path):
    run = judge(load_run(run_of(tmp_path / "run", late, steps=6), "run"))
    first = causes(run)[0]
    assert first.interval_ms is None
    assert "too few" in first.why_no_interval
    assert "rank 1" in first.headline


def test_every_rule_has_a_change_for_any_stack_and_a_check():
    for kind, rule in rules().items():
        assert rule.kind == kind
        assert rule.change[-1].stack == ["any"]
        assert "aorta compare {path} NEW" in rule.check  # the run itself shows no change
        assert 0 < rule.least_share < 0.5


@pytest.mark.heavy
def test_a_pipelines_longest_stage_is_asked_to_give_layers_away(tmp_path):
    first = found(tmp_path / "run", unequal_stages)[0]
    assert "move layers" in first.change
    assert any("if they were equal" in sentence for sentence in first.evidence)


def reduces_each_micro_batch(rank, step, noise):
    """Three micro-batches, each with a reduction of the same bucket of which 1 ms sticks out."""
    host = Host()
    for _ in range(3):
        host.work(12.0 * noise.gauss(1, 0.005)).comm(1.0, module=0)
    return host, {"modules": ["bucket 0: head.weight"]}


def test_the_same_bucket_reduced_three_times_is_named_with_two_thirds_of_it(tmp_path):
    first = found(tmp_path / "run", reduces_each_micro_batch)[0]
    assert first.kind == "transfer"
    assert first.ms == pytest.approx(2.0, rel=0.15)
    assert "no_sync()" in first.change


@pytest.mark.parametrize(("passes", "steps"), [(3, 20), (3, 9), (3, 7), (1, 20)])
def test_reductions_beside_a_backward_pass_on_a_cpu_take_its_cores(tmp_path, passes, steps):
    """Of 5 ms each reduction has 1 alone: of two in three 2 ms are sure, 8 more may go, and what copies of 2
    MiB take, four passes at 4 GB/s: of both half is told."""

    def each_pass(rank, step, noise):
        host = Host()
        for _ in range(passes):
            host.work(12.0 * noise.gauss(1, 0.005))
            host.comm(5.0, start=host.at - 4.0, module=0).idle(1.0)
        return host, {"modules": ["bucket 0: head.weight"]}

    causes_of = causes(judge(load_run(run_of(tmp_path / "run", each_pass, steps=steps), "run")))
    told = [one for one in causes_of if "gradients, reduced" in one.subject]
    if passes == 1:
        assert told == []
        return
    [cause] = told
    assert cause.subject.startswith(
        "exposed transfer: gradients, reduced 3 times for one update (all_reduce)"
    )
    assert cause.ms == pytest.approx(2.0 + (8.0 + 2 * 4 * MIB / 4e6) / 2, rel=0.1)
    assert cause.interval_ms[0] == pytest.approx(2.0, rel=0.15)
    assert cause.interval_ms[1] > 10.0
    assert any("it has 3 passes of 13.0 ms" in text for text in cause.evidence)


@pytest.mark.parametrize(("dtype", "ms"), [("bfloat16", 2.0), ("float32", None)])
def test_gradients_wider_than_parameters_cost_the_transfer_of_the_bytes_beyond(tmp_path, dtype, ms):
    """4 ms of float32 stick out; 2 % of the parameters are norms in float32."""

    def step(rank, step, noise):
        host = Host().work(20.0 * noise.gauss(1, 0.005), "backward")
        return host.comm(4.0, size=8 * MIB, module=0).work(1.0, "optimizer"), {"modules": ["bucket 0: head"]}

    sizes = {dtype: 98.0, "float32": 2.0 if ms else 100.0}
    program = {"optimizers": [{"parameter_bytes": 100.0, "bytes_of_dtypes": sizes}]}
    wide = [
        (cause.ms, cause.subject[:63])
        for cause in found(tmp_path / "run", step, run_record(2, program=program))
        if cause.kind == "wide_dtype"
    ]
    text = "8.0 MiB a step travel as float32 where parameters are bfloat16:"
    assert wide == ([(pytest.approx(ms, rel=0.1), text)] if ms else [])


def two_models_in_turn(rank, step, noise):
    """The buckets of both have one name, and an optimizer steps behind each reduction."""
    host = Host()
    for _ in range(3):
        host.work(12.0 * noise.gauss(1, 0.005), "backward").comm(1.0, module=0).work(0.5, "optimizer")
    return host, {"modules": ["bucket 0: head.weight"]}


def test_reductions_with_an_optimizer_behind_each_are_no_accumulation(tmp_path):
    assert not any("no_sync()" in cause.change for cause in found(tmp_path / "run", two_models_in_turn))


def units_reduced_each_micro_batch(rank, step, noise):
    """Two units of fully_shard: of each micro-batch's gathers 2 ms stick out, of its reductions 1 ms."""
    host = Host()
    for _ in range(3):
        for unit in range(2):
            host.comm(1.0, "all_gather", module=unit).work(12.0 * noise.gauss(1, 0.005))
        for unit in range(2):
            host.comm(0.5, "reduce_scatter", module=unit)
    return host, {"modules": ["layers.0", "layers.1"]}


def test_units_reduced_three_times_are_named_with_two_thirds_of_their_reductions_alone(tmp_path):
    (cause,) = found(tmp_path / "run", units_reduced_each_micro_batch)
    assert cause.ms == pytest.approx(2.0, rel=0.15)
    assert "reduced 3 times between two optimizer steps: set_requires_gradient_sync(False)" in cause.change


@pytest.mark.parametrize(("operators", "ms"), [(6000, 18.0), (600, None)], ids=["5-us-each", "50-us-each"])
def test_a_loop_over_operators_costs_what_they_need_beside_their_arithmetic(tmp_path, operators, ms):
    """30 ms of compute; an operator needs 3 us of it, where no samples show the loop."""
    loop = OperatorLoop(
        kind="recurrence", at=StackFrame("a.py", 3, "Cell.forward", True), first_line=3, last_line=4,
        iterations=100, operators=operators // 3, all_operators=operators, flops=1.0, bytes=0.0,
    )  # fmt: skip
    work = WorkOfStep(flops=100.0, loop=loop)
    causes_of = found(tmp_path / "run", lambda rank, step, noise: plain(noise), run_record(2, work=work))
    assert [(cause.kind, cause.ms) for cause in causes_of] == (
        [] if ms is None else [("compute", pytest.approx(ms, rel=0.01))]
    )


@pytest.mark.parametrize(("hoisted", "told"), [(0.0, [20.0]), (0.5, [10.0, 10.0])])
def test_a_loop_has_no_part_in_what_is_computed_again_in_it(tmp_path, hoisted, told):
    """Of 30 ms its samples show 10 forward, and as much backward; half of it may be for weights."""
    at = FRAMES["task"]
    row = LineOfWork(
        at=at, operators=6000, flops=1.0, bytes=0.0, forward_flops=1.0, forward_bytes=0.0, handed_bytes=0.0
    )
    loop = OperatorLoop(
        kind="recurrence", at=at, first_line=at.line, last_line=at.line,
        iterations=100, operators=3000, all_operators=6000, flops=1.0, bytes=0.0,
    )  # fmt: skip
    work = WorkOfStep(
        flops=100.0, loop=loop, lines=[row], hoisted=hoisted, hoisted_at=at, hoisted_share=hoisted,
        hoisted_launched=hoisted,
    )  # fmt: skip

    def make(rank, step, noise):
        return Host().work(30.0), {"world_size": 1}

    folder = run_of(tmp_path / "run", make, run_record(1, work=work), width=1)
    write_stacks(folder, 0, ("task", "forward", "runs", 10.0), ("backward", "backward", "runs", 20.0))
    named = causes(judge(load_run(folder, "run")))
    assert [cause.ms for cause in named] == [pytest.approx(ms, rel=0.05) for ms in told]


AT = StackFrame("a.py", 3, "Net.forward", True)


@pytest.mark.parametrize(
    ("num", "operators", "least_ms", "most_ms"),
    [
        # 16 calls beyond one, of 100 operators with 5 us each and 10 MB through which a core goes 6 times at
        # 40 GB/s; at most what 16 of 17 calls take.
        pytest.param(17, 100, 16 * (0.5 + 1.5), 30.0 * 16 / 17, id="many"),
        pytest.param(17, 5, 16 * (0.025 + 1.5), 30.0 * 16 / 17, id="of-few-operators"),
        pytest.param(3, 100, None, None, id="as-few-as-of-a-triplet"),
    ],
)
def test_calls_on_few_rows_cost_what_each_needs_whatever_its_rows(
    num, operators, least_ms, most_ms, tmp_path
):
    calls = CallsOfFewRows(num=num, rows=2, operators=operators, parameter_bytes=10_000_000, at=AT)
    run = run_record(2, work=WorkOfStep(flops=100.0, calls=calls))
    causes_of = found(tmp_path / "run", lambda rank, step, noise: plain(noise), run)
    if least_ms is None:
        assert causes_of == []
        return
    (cause,) = causes_of
    least_ms = min(least_ms, most_ms)
    assert cause.ms == pytest.approx(math.sqrt(least_ms * most_ms), rel=0.01)
    assert cause.subject == f"{num} calls of the model a step, on 2 rows each in Net.forward(), a.py:3"
    assert cause.interval_ms[0] <= least_ms <= most_ms <= cause.interval_ms[1] + 0.1
    assert cause.change.startswith("call the model on more rows at a time")


@pytest.mark.parametrize("num", [9, 900])
def test_results_that_nothing_reads_cost_what_samples_of_their_line_show_forward(num, tmp_path, monkeypatch):
    """Of 30 ms by FLOPs 6, two thirds of them backward; and two thirds of 9 ms of samples. Few may be off by
    1.96 / 3 on a scale of ratios, beside 0.3 as always."""
    monkeypatch.setattr(needless, "sampled", lambda *_: [9.0 / num] * num)
    line = LineOfWork(
        at=AT, operators=3, flops=30.0, bytes=1.0, forward_flops=10.0, forward_bytes=1.0, handed_bytes=0.0
    )
    run = run_record(2, work=WorkOfStep(flops=100.0, unused=20.0, unused_at=AT, lines=[line]))
    (cause,) = found(tmp_path / "run", lambda rank, step, noise: plain(noise), run)
    assert cause.ms == pytest.approx(10.0, rel=0.01)
    error = math.hypot(0.3, 1.96 / math.sqrt(num))
    assert cause.interval_ms[0] == pytest.approx(10.0 * math.exp(-error), rel=0.02)


@pytest.mark.parametrize(
    ("columns", "every", "ms", "words"),
    [
        # Calls on 7, 8, 9 and 10 positions compute 34; with a cache they compute 7, and then one each.
        pytest.param(
            (7, 10), 1, 24.0 * 24 / 34, "of 4 but the first computes one position, not 7 to 10", id="longer"
        ),
        pytest.param(
            (7, 7),
            1,
            24.0,
            "from the 4 calls, as in an evaluation, make them in one step of N; else make fewer",
            id="alike",
        ),
        pytest.param(None, 1, 24.0, "do it less often", id="evaluation"),
        pytest.param((7, 10), 4, 24.0 * 5 / 23, "do it less often", id="in-some-steps"),  # 5 of 23 judged
    ],
)
def test_calls_between_eval_and_train_that_make_what_a_step_trains_on(tmp_path, columns, every, ms, words):
    quiet = (
        None if columns is None else QuietCalls(num=4, columns=columns, at=StackFrame("a.py", 3, "f", True))
    )
    run = run_record(2, work=WorkOfStep(quiet=quiet))

    def make(rank, step, noise):
        host = Host() if step % every else Host().work(24.0, "pause")
        return host.work(30.0 * noise.gauss(1, 0.01)).comm(2.0)

    cause = found(tmp_path / "run", make, run)[0]
    assert (cause.kind, cause.ms) == ("pause", pytest.approx(ms, rel=0.03))
    assert words in cause.change
    is_of_calls = columns is not None and every == 1
    assert ("4 calls of the model a step" in cause.subject) == is_of_calls
    assert (cause.interval_ms is None) == is_of_calls  # what is told is the most that may go


@pytest.mark.parametrize("is_apart", [True, False])
def test_a_pass_without_a_graph_is_offered_where_nothing_trains_in_it(tmp_path, is_apart):
    work = WorkOfStep(flops=100.0, unread=40.0, unread_at=AT, unread_is_apart=is_apart)
    (cause,) = found(tmp_path / "run", lambda rank, step, noise: plain(noise), run_record(2, work=work))
    assert ("no_grad() around what is called at Net.forward(), a.py:3" in cause.change) == is_apart
    assert "requires_grad_(False)" in cause.change


@pytest.mark.parametrize(
    ("of_products", "ms", "least_ms"),
    [(0.32, 30 * 0.24, 30 * 0.18), (0.18, 30 * 0.18, None), (0.0, 30 * 0.18, None)],
    ids=["both", "alike", "no-products"],
)
def test_derivatives_by_one_input_each_take_between_their_products_and_operators(
    tmp_path, of_products, ms, least_ms
):
    calls = DerivativeCalls(num=12, num_again=5, of_products=of_products, of_operators=0.18, at=AT)
    run = run_record(2, work=WorkOfStep(flops=100.0, derivatives=calls))
    (cause,) = found(tmp_path / "run", lambda rank, step, noise: plain(noise), run)
    assert cause.ms == pytest.approx(ms, rel=0.02)
    assert least_ms is None or cause.interval_ms[0] <= least_ms
    assert cause.subject.startswith("5 calls of autograd.grad for one more input")
    assert cause.change.startswith("one torch.autograd.grad(output, [x, y, ...])")
    assert cause.change.endswith("Net.forward(), a.py:3")


@pytest.mark.parametrize(("of", "told"), [("VGGLoss.features", "in VGGLoss.features"), ("", "that no opt")])
def test_parameters_whose_gradients_nobody_reads_are_named_by_their_module(tmp_path, of, told):
    work = WorkOfStep(flops=100.0, unread=40.0, unread_at=AT, unread_of=of, unread_num=32)
    (cause,) = found(tmp_path / "run", lambda rank, step, noise: plain(noise), run_record(2, work=work))
    assert f"requires_grad_(False) for {'the ' if of else ''}parameters {told}" in cause.change
    is_told = "they are of 32 parameters in VGGLoss.features, which no optimizer has" in cause.evidence
    assert is_told == bool(of)


@pytest.mark.parametrize(("mib", "ms"), [(40, math.sqrt(4.19 * 30.0)), (4, None)])
def test_gradients_set_to_zero_cost_four_passes_over_them(mib, ms, tmp_path):
    """At 40 GB/s 4.19 ms; at 4 GB/s more than the 30 ms of work."""
    work = WorkOfStep(flops=100.0, zeroed_bytes=float(mib << 20))
    causes_of = found(tmp_path / "run", lambda rank, step, noise: plain(noise), run_record(2, work=work))
    assert [(cause.ms, cause.change[:11]) for cause in causes_of] == (
        [] if ms is None else [(pytest.approx(ms, rel=0.01), "zero_grad()")]
    )


@pytest.mark.parametrize(
    ("lines", "is_told"),
    [
        pytest.param("images.requires_grad_()\nloss = model(images)\n", True, id="asked-for"),
        pytest.param("images.requires_grad_()\nprint(images.grad)\n", False, id="read"),
        pytest.param("grad = torch.autograd.grad(loss, images)\n", False, id="by-a-pass-of-its-own"),
        pytest.param("y = checkpoint(block, images, use_reentrant=True)\n", False, id="of-a-checkpoint"),
        pytest.param(None, False, id="without-source"),
    ],
)
def test_gradients_of_inputs_are_needless_where_the_source_reads_none(lines, is_told, tmp_path):
    file = tmp_path / "train.py"
    if lines is not None:
        file.write_text(lines)
    work = WorkOfStep(flops=100.0, inputs=40.0, inputs_at=StackFrame(str(file), 2, "<module>", True))
    run = run_record(2, work=work, command=[str(file)], started_unix_ns=1 << 62)
    causes_of = found(tmp_path / "run", lambda rank, step, noise: plain(noise), run)
    assert [cause.subject.partition(" in ")[0] for cause in causes_of] == (
        ["gradients of what the model is given, which nobody reads, asked for"] if is_told else []
    )


@pytest.mark.parametrize(("backward_ms", "ms"), [(29.0, 27.0), (18.0, 18.0)])
def test_gradients_that_nobody_reads_take_no_longer_than_the_backward_pass(backward_ms, ms, tmp_path):
    """Of 30 ms by FLOPs 27."""

    def make(rank, step, noise):
        return Host().work(30.0 - backward_ms).work(backward_ms, "backward").comm(2.0)

    run = run_record(2, work=WorkOfStep(flops=100.0, unread=90.0, unread_at=AT))
    (cause,) = found(tmp_path / "run", make, run)
    assert cause.ms == pytest.approx(ms, rel=0.02)
    assert cause.interval_ms[1] <= 1.01 * backward_ms


@pytest.mark.parametrize(("backward_ms", "ms"), [(20.0, 10.0), (2.0, 3.0), (1.0, None)])
def test_a_pass_once_more_takes_no_more_than_those_that_train_let_it(backward_ms, ms, tmp_path):
    """Half as many FLOPs beside those of a step: a third of 30 ms, unless the program's own code is."""

    def step(rank, step, noise):
        return Host().work(30.0 - backward_ms).work(backward_ms, "backward").comm(2.0)

    run = run_record(2, work=WorkOfStep(flops=100.0, twice=50.0, twice_at=AT))
    causes_of = found(tmp_path / "run", step, run)
    assert [cause.ms for cause in causes_of] == ([] if ms is None else [pytest.approx(ms)])


@pytest.mark.parametrize(
    ("op", "subject", "change", "ms"),
    [
        ("spread", "products of rows that were repeated before", "multiply first", 12.0),
        # Of which a convolution takes a quarter.
        ("unfolded", "convolutions made of unfold() and a product", "torch.nn.functional.conv2d", 9.0),
    ],
)
def test_products_that_a_cpu_need_not_compute(op, subject, change, ms, tmp_path):
    """Two fifths of 30 ms."""
    run = run_record(2, work=WorkOfStep(flops=100.0, **{op: 40.0, f"{op}_at": AT}))
    (cause,) = found(tmp_path / "run", lambda rank, step, noise: plain(noise), run)
    assert cause.subject == f"{subject} in Net.forward(), a.py:3"
    assert (cause.change.startswith(change), cause.ms) == (True, pytest.approx(ms, rel=0.01))


def test_a_product_for_ignored_targets_is_told_to_choose_its_positions(tmp_path):
    work = WorkOfStep(flops=100.0, unused=40.0, unused_at=AT, ignored=0.8)
    (cause,) = found(tmp_path / "run", lambda rank, step, noise: plain(noise), run_record(2, work=work))
    assert cause.subject == ("products at positions whose targets the loss ignores in Net.forward(), a.py:3")
    assert "x[targets != ignore_index]" in cause.change


@pytest.mark.parametrize(
    ("work", "remedy"),
    [
        (
            WorkOfStep(flops=100.0, padding=0.8, padding_columns=0.7),
            "by a collate_fn of the loader made at train.py:9",
        ),
        (
            WorkOfStep(flops=100.0, rows_bytes=4e7, rows_at=AT),
            "where the table is made that Net.forward(), a.py:3 looks up, and SparseAdam for it alone, beside"
            " the Adam of train.py:36 for the rest",
        ),
    ],
)
def test_what_is_set_elsewhere_is_told_with_where_that_is_made(tmp_path, work, remedy):
    """Rows of 40 MB are written for 10 ms."""
    run = run_record(2, work=work)
    run.program = {
        "loaders": [{"num_workers": 2, "num_batches": 9, "site": "train.py:9"}],
        "optimizers": [{"kind": "Adam", "parameter_bytes": 5e7, "site": "train.py:36"}],
    }
    first = found(tmp_path / "run", lambda rank, step, noise: plain(noise), run)[0]
    assert remedy in first.change


@pytest.mark.parametrize(("columns", "is_told"), [(0.3, True), (0.4, False)])
def test_what_ends_all_rows_alike_is_no_padding(tmp_path, columns, is_told):
    """As the steps in which a network answers, of a task that has it copy what it read."""
    run = run_record(2, work=WorkOfStep(flops=100.0, padding=0.4, padding_columns=columns))
    named = found(tmp_path / "run", lambda rank, step, noise: plain(noise), run)
    assert any(one.subject.startswith("padding of batches") for one in named) == is_told


@pytest.mark.parametrize(
    ("kind", "takes_them"), [("Adagrad", True), ("SGD", True), ("Adam", False), ("RMSprop", False)]
)
def test_an_optimizer_that_takes_sparse_gradients_needs_none_beside_it(tmp_path, kind, takes_them):
    run = run_record(2, work=WorkOfStep(flops=100.0, rows_bytes=4e7, rows_at=AT))
    run.program = {"optimizers": [{"kind": kind, "parameter_bytes": 5e7, "site": "train.py:36"}]}
    change = found(tmp_path / "run", lambda rank, step, noise: plain(noise), run)[0].change
    assert (f"{kind} (train.py:36) takes such gradients" in change) is takes_them
    assert ("SparseAdam for it alone" in change) is not takes_them


@pytest.mark.parametrize(
    ("attention_ms", "part"),
    [
        pytest.param(0.0, 0.5, id="linear"),
        pytest.param(6.0, 0.5 + 0.5 * 0.25, id="half-attention"),
        pytest.param(12.0, 1 - 0.5**2, id="all-attention"),
    ],
)
def test_what_half_of_a_length_saves_of_attention_goes_with_its_square(tmp_path, attention_ms, part):
    """Of 12 ms of forward passes; backward passes, of which no sample tells, have as much of it."""
    run = run_record(2, work=WorkOfStep(flops=100.0, attention=3.0, padding=0.6, padding_columns=0.5))
    run_of(tmp_path / "run", lambda rank, step, noise: plain(noise), run)
    for rank in range(2):
        others = ("model", "forward", "runs", 12.0 - attention_ms)
        write_stacks(tmp_path / "run", rank, ("attends", "forward", "runs", attention_ms), others)
    cause = next(one for one in causes(judge(load_run(tmp_path / "run", "run"))) if one.kind == "compute")
    assert cause.ms == pytest.approx(part * 30.0, rel=0.02)
    low, high = cause.interval_ms
    assert low < cause.ms < high < 32.0
    assert high > 0.74 * 30.0
    assert any("square of the length" in text for text in cause.evidence) is (attention_ms > 0)


def test_padding_whose_targets_are_ignored_is_not_told_twice(tmp_path):
    """Of 30 ms 12 go with the ignored targets, and half of the rest with the padding."""
    work = WorkOfStep(flops=100.0, unused=40.0, unused_at=AT, ignored=0.8, padding=0.5)
    found_both = found(tmp_path / "run", lambda rank, step, noise: plain(noise), run_record(2, work=work))
    assert [cause.ms for cause in found_both] == [pytest.approx(12.0, rel=0.01), pytest.approx(9.0, rel=0.01)]


@pytest.mark.parametrize(
    ("looked_up", "optimizers", "ms"),
    [
        # 40 MB are written for 10 to 32 ms, and four fifths of Adam's 10 ms are theirs; 2.11 ms of a sparse
        # update go off, or a fifth.
        pytest.param((1000, 2.56e5), [("Adam", 5e7)], (17.89 + 8 - 0.94, 8 + 10 - 2.11), id="few"),
        pytest.param((30_000, 7.68e6), [("Adam", 5e7)], (4, 4), id="so-many-that-only-fused-saves"),
        pytest.param((12_000, 3.07e6), [("Adam", 5e7)], (17.89 + 8 - 9.83, 4), id="sure-is-what-fused-saves"),
        pytest.param((12_000, 3.07e6), [("SGD", 5e7)], (None, 0), id="which-is-not-of-all"),
        pytest.param(
            (1000, 2.56e5), [("Adam", 4e7), ("SGD", 4e7)], (17.89 + 30 / 23 - 0.94, 9.2), id="of-adam-or-sgd"
        ),
        pytest.param(
            (1000, 2.56e5), [("SGD", 4.1e7), ("Adam", 1e7)], (17.89 + 3.71 - 0.94, 11.6), id="of-sgd"
        ),
        pytest.param((None, 0.0), [("Adam", 5e7)], (18.0, None), id="of-an-earlier-version"),
    ],
)
def test_rows_that_are_looked_up_cost_a_sparse_update(tmp_path, looked_up, optimizers, ms):
    work = WorkOfStep(
        flops=100.0,
        rows_bytes=4e7,
        rows_at=AT,
        rows_looked_up=looked_up[0],
        rows_looked_up_bytes=looked_up[1],
    )
    run, (lost_ms, sure_ms) = run_record(2, work=work), ms
    rows = [{"kind": kind, "parameter_bytes": size, "site": "train.py:36"} for kind, size in optimizers]
    run.program = {"optimizers": rows}

    def make(rank, step, noise):
        return Host().work(30.0).work(10.0, "optimizer", "Adam", 1 << 20).comm(2.0)

    causes_of = found(tmp_path / "run", make, run)
    told = [one for one in causes_of if "not looked up" in one.subject]
    assert [one.ms for one in told] == ([] if lost_ms is None else [pytest.approx(lost_ms, rel=0.01)])
    if not told:
        return
    [cause] = told
    if sure_ms is None:
        assert cause.interval_ms is None
        assert cause.why_no_interval.startswith("what sparse updates take was not")
        return
    assert cause.interval_ms == (pytest.approx(sure_ms * math.exp(-0.3), rel=0.02), ANY)
    assert cause.interval_ms[1] > lost_ms
    if sparse_ms := {1000: 0.94, 12_000: 9.83}.get(looked_up[0]):
        # Writing takes up to 32 ms, a sparse update as little as 0.45 of that: hardly both, and nothing else.
        beyond_ms = math.hypot(32 - 17.89, (1 - 0.447) * sparse_ms)
        assert cause.interval_ms[1] < 1.01 * (lost_ms * math.exp(0.3) + beyond_ms)
    assert any("sparse gradients and their update are taken off" in text for text in cause.evidence)
    assert ("else fused=True at train.py:36" in cause.change) == (sure_ms == 4)
    if optimizers == [("Adam", 5e7)] and lost_ms > 5:  # the same passes over memory, of which it is most
        assert "optimizer" not in [one.kind for one in causes_of]


def test_a_loss_whose_measures_reach_beyond_the_step_is_told_up_to_it(tmp_path):
    """Adam goes through a table of 40 MB, which takes 10 to 32 ms to write, in a step of 42 ms."""
    work = WorkOfStep(
        flops=100.0, rows_bytes=4e7, rows_at=AT, rows_looked_up=1000, rows_looked_up_bytes=2.56e5
    )
    run = run_record(2, work=work)
    run.program = {"optimizers": [{"kind": "Adam", "parameter_bytes": 4e7, "site": "train.py:36"}]}

    def make(rank, step, noise):
        return Host().work(22.0).work(20.0, "optimizer", "Adam", 1 << 20)

    told = [one for one in found(tmp_path / "run", make, run) if "not looked up" in one.subject]
    assert [one.ms for one in told] == [pytest.approx(17.89 + 20 - 0.94, rel=0.02)]
    assert told[0].interval_ms == (ANY, pytest.approx(42.0, rel=0.01))


@pytest.mark.parametrize(
    ("threads", "cores", "workers", "set_at", "ms"),
    [
        pytest.param(1, 4, 0, None, 9.8, id="half"),
        pytest.param(2, 4, 0, None, None, id="all"),
        pytest.param(1, 3, 0, None, None, id="one-is-no-more-a-rank"),
        pytest.param(1, 4, 1, None, None, id="workers-have-them"),
        pytest.param(1, None, 0, None, None, id="nobody-counted-them"),
        pytest.param(1, 4, 0, ("a.py", 7), None, id="as-the-program-says"),
    ],
)
def test_cores_that_idle_cost_their_part_of_what_operators_compute(
    tmp_path, threads, cores, workers, set_at, ms
):
    """Two ranks, 30 ms of compute: 80 operators of 25 us are not divided, 0.7 of half of the rest is lost."""
    at = StackFrame("a.py", 3, "Net.forward", True)
    line = LineOfWork(
        at=at, operators=80, flops=1.0, bytes=1.0, forward_flops=1.0, forward_bytes=1.0, handed_bytes=0.0
    )
    modes = {"num_threads": threads, "num_whole_cores": cores, "threads_at": set_at}
    run = run_record(2, work=WorkOfStep(flops=1.0, lines=[line]))
    left = {"num_workers": 2, "num_batches": 0}  # accelerate takes its batches by another one
    run.program = {"modes": modes, "loaders": [{"num_workers": workers, "num_batches": 9}, left]}
    folder = run_of(tmp_path / "run", lambda rank, step, noise: plain(noise), run)
    told = found_causes(judge(load_run(folder, "run")))
    assert [cause.ms for cause in told.listed] == ([] if ms is None else [pytest.approx(ms, rel=0.01)])
    assert all("set_num_threads(2)" in cause.change for cause in told.listed)
    assert ["a.py:7: 1 thread in each process, of 4 cores" in text for text in told.no_loss] == (
        [True] if set_at else []
    )
    assert not any("another thread" in text for text in told.no_loss)
    write_stacks(folder, 0, COMMON, ("task", "forward", "locked_out", 1.0))
    told = found_causes(judge(load_run(folder, "run")))
    assert all(
        "threads may, beside another thread of the process, save up to" in text for text in told.no_loss
    )


@pytest.mark.parametrize(
    ("threads", "process_ms", "idle", "ms"),
    [
        # Of 4 cores and 30 ms of work, all of the thread's; others have what neither it nor nobody has.
        pytest.param(1, 30.0, 3.0, 0.7 * 0.75 * 30, id="nobody-has-them"),
        pytest.param(1, 30.0, 2.0, 0.7 * 0.5 * 30, id="others-have-one"),
        pytest.param(1, 30.0, 0.4, None, id="others-have-them"),
        pytest.param(1, 102.0, 0.6, None, id="other-threads-of-the-process-have-them"),
        pytest.param(2, 60.0, 2.0, 0.7 * 0.5 * 30, id="both-threads-work"),
        pytest.param(2, 33.0, 2.9, None, id="the-second-thread-has-nothing-to-do"),
    ],
)
def test_cores_that_idle_are_measured(tmp_path, threads, process_ms, idle, ms):
    modes = {"num_threads": threads, "num_whole_cores": 4, "num_cores": 4, "threads_at": (TRAIN, 7)}
    run = run_record(1, work=WorkOfStep(flops=1.0, lines=[]))
    run.program = {"modes": modes | {"idle_cores": idle, "own_cores": process_ms / 30.0}}

    def make(rank, step, noise):
        return Host().work(30.0), {"world_size": 1, "host_use": HostUse(30.0, 0.0, process_ms)}

    named = causes(judge(load_run(run_of(tmp_path / "run", make, run, width=1), "run")))
    assert [cause.ms for cause in named] == ([] if ms is None else [pytest.approx(ms, rel=0.01)])
    for cause in named:
        assert f"of its 4 cores {4 - idle:.2f} were in use on average" in " ".join(cause.evidence)
        assert f"torch.set_num_threads({threads + round(idle)})" in cause.change


def test_threads_of_torch_take_no_part_in_python(tmp_path):
    """Of 30 ms the thread runs 8 in a loop of the program and 22 in operators; some steps have 60 ms."""
    modes = {"num_threads": 1, "num_whole_cores": 2}
    run = run_record(1, work=WorkOfStep(flops=1.0, lines=[]), program={"modes": modes})

    def make(rank, step, noise):
        return Host().work(60.0 if step in (7, 15, 23) else 30.0), {"world_size": 1}

    folder = run_of(tmp_path / "run", make, run, width=1)
    write_stacks(folder, 0, ("augment", "rest", "runs", 8.0), ("mean", "forward", "runs", 22.0))
    ms = {cause.origin: cause.ms for cause in causes(judge(load_run(folder, "run")))}
    assert ms["threads"] == pytest.approx(0.7 * 0.5 * 22, rel=0.02)
    write_stacks(folder, 0, ("augment", "rest", "runs", 22.0), ("mean", "forward", "runs", 8.0))
    assert "threads" not in {cause.origin for cause in causes(judge(load_run(folder, "run")))}


@pytest.mark.parametrize(
    ("faults", "system_ms", "load_ms", "ms"),
    [
        pytest.param(4000, 8.0, 0.0, 8.0, id="two-us-each"),
        pytest.param(400, 8.0, 0.0, None, id="the-system-does-something-else"),
        pytest.param(1200, 8.0, 0.0, 6.0, id="no-more-than-pages-may-take"),
        pytest.param(4000, 4.0, 0.0, None, id="little"),
        pytest.param(4000, 8.0, 15.0, None, id="batches-may-take-them"),
        pytest.param(None, None, 0.0, None, id="nobody-counted"),
    ],
)
def test_new_pages_take_what_the_thread_is_in_the_system_for_them(tmp_path, faults, system_ms, load_ms, ms):
    """Of a step of 30 ms."""
    at = StackFrame("a.py", 3, "Net.forward", True)
    line = LineOfWork(
        at=at, operators=80, flops=1.0, bytes=9.0, forward_flops=1.0, forward_bytes=5.0, handed_bytes=0.0
    )
    run = run_record(1, work=WorkOfStep(lines=[line]))

    def make(rank, step, noise):
        host = Host().work(load_ms, "data") if load_ms else Host()
        use = HostUse(30.0, 0.0, 30.0, faults, system_ms)
        return host.work(30.0 - load_ms), {"world_size": 1, "host_use": use}

    judged = judge(load_run(run_of(tmp_path / "run", make, run, width=1), "run"))
    found = causes(judged)
    named = [one for one in found if "new pages" in one.subject]
    assert [one.ms for one in named] == ([] if ms is None else [pytest.approx(ms, rel=0.01)])
    others = [text for text in notes(found_causes(judged), judged) if "takes 4,000 new pages" in text]
    is_left = (ms is None and faults == 4000) or load_ms > 0
    assert len(others) == is_left  # whatever they are for
    for cause in named:
        assert cause.headline.startswith(
            "new pages of memory for results of operators in Net.forward(), a.py:3:"
        )
        assert cause.interval_ms is not None
        low, high = cause.interval_ms
        assert low <= ms / 2
        assert ms * 1.5 <= high
        assert cause.change.startswith("MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=")


@pytest.mark.parametrize(
    ("own_ms", "rows_bytes", "is_told"), [(1.0, 0.0, True), (12.0, 0.0, False), (1.0, 2e7, False)]
)
def test_new_pages_that_others_may_take_are_not_results_of_operators(
    monkeypatch, tmp_path, own_ms, rows_bytes, is_told
):
    """8 of a step of 30 ms; beside the model the program works for own_ms, and gradients of a table's rows
    take rows_bytes: 4000 pages are 16 MB."""
    rest = SimpleNamespace(phase="rest", ms=own_ms)
    monkeypatch.setattr(needless, "phases_of", lambda judged: [rest])

    def make(rank, step, noise):
        return Host().work(30.0), {"world_size": 1, "host_use": HostUse(30.0, 0.0, 30.0, 4000, 8.0)}

    run = run_record(1, work=WorkOfStep(rows_bytes=rows_bytes))
    found = causes(judge(load_run(run_of(tmp_path / "run", make, run, width=1), "run")))
    assert any("new pages" in one.subject for one in found) == is_told


def test_results_handed_through_memory_leave_out_its_new_pages(tmp_path):
    """Which are 6 of the 30 ms: 0.8 of what is told where nobody counted faults."""
    line = LineOfWork(
        at=FRAMES["task"], operators=8, flops=1.0, bytes=5e7, forward_flops=0.0, forward_bytes=5e7,
        handed_bytes=4e7,
    )  # fmt: skip
    run = run_record(1, work=WorkOfStep(flops=1.0, bytes=5e7, lines=[line]))
    handed_ms = []
    for name, use in (("uncounted", ()), ("counted", (3000, 6.0))):

        def make(rank, step, noise, use=use):
            return Host().work(30.0), {"world_size": 1, "host_use": HostUse(30.0, 0.0, 30.0, *use)}

        folder = run_of(tmp_path / name, make, run, width=1)
        write_stacks(folder, 0, ("task", "forward", "runs", 20.0), ("backward", "backward", "runs", 10.0))
        told = {one.subject.partition(" in ")[0]: one.ms for one in causes(judge(load_run(folder, "run")))}
        handed_ms.append(told["operators that hand their results to each other through memory"])
        pages_ms = told.get("new pages of memory for results of operators")
        assert pages_ms == (pytest.approx(6.0, rel=0.01) if use else None)
    assert handed_ms[1] == pytest.approx(0.8 * handed_ms[0], rel=0.01)


def test_new_pages_go_with_what_is_computed_for_nobody(tmp_path):
    """9 of 30 ms, of which a third is for gradients that nobody reads."""
    line = LineOfWork(
        at=FRAMES["task"], operators=8, flops=1.0, bytes=5e7, forward_flops=0.0, forward_bytes=5e7,
        handed_bytes=0.0,
    )  # fmt: skip
    run = run_record(1, work=WorkOfStep(flops=9.0, unread=3.0, unread_at=AT, lines=[line]))

    def make(rank, step, noise):
        return Host().work(30.0), {"world_size": 1, "host_use": HostUse(30.0, 0.0, 30.0, 3000, 9.0)}

    told = causes(judge(load_run(run_of(tmp_path, make, run, width=1), "run")))
    assert [one.ms for one in told] == [pytest.approx(10.0, rel=0.01), pytest.approx(6.0, rel=0.01)]
    assert told[1].subject.startswith("new pages of memory")


def test_what_is_computed_once_more_takes_as_long_as_its_lines_were_seen(tmp_path):
    """Three of the four operators of a line that takes 16 ms, as to sort does, of few bytes."""
    line = LineOfWork(
        at=FRAMES["task"], operators=4, flops=0.0, bytes=4.0, forward_flops=0.0, forward_bytes=4.0,
        handed_bytes=0.0, forward_computing=4.0, forward_again=3.0,
    )  # fmt: skip
    work = WorkOfStep(flops=100.0, bytes=50.0, repeated_bytes=3.0, repeated_at=AT, lines=[line])
    folder = run_of(tmp_path, lambda rank, step, noise: plain(noise), run_record(2, work=work))
    for rank in (0, 1):
        write_stacks(folder, rank, ("task", "forward", "runs", 16.0), ("backward", "backward", "runs", 14.0))
    (cause,) = causes(judge(load_run(folder, "run")))
    assert cause.ms == pytest.approx(12.0 * 32 / 30, rel=0.05)
    assert cause.subject == "what a forward pass computes once more from the same in Net.forward(), a.py:3"


@pytest.mark.parametrize(
    ("frame", "phase", "num_bytes", "text", "ms"),
    [
        pytest.param("augment", "forward", 2e6, "x.square()", 8.0 / 2, id="in-front-of-the-model"),
        pytest.param("augment", "data", 2e6, "x.square()", None, id="in-a-data-set"),
        pytest.param("augment", "forward", 1e3, "x.square()", None, id="of-few-bytes"),
        pytest.param("augment", "forward", 2e6, "np.array(json.loads(x))", None, id="it-parses"),
        pytest.param("main", "forward", 2e6, "x.square()", None, id="in-the-loop"),
    ],
)
def test_a_cast_from_fp64_tells_that_its_function_computes_in_it(
    tmp_path, monkeypatch, frame, phase, num_bytes, text, ms
):
    source = Source(None, b"\n" * 4 + text.encode())
    monkeypatch.setattr(needless, "source_of", lambda file, record: source)
    at = FRAMES["augment" if frame == "augment" else "main"]
    run = run_record(2, work=WorkOfStep(narrowed_bytes=num_bytes, narrowed_at=at))
    folder = run_of(tmp_path, lambda rank, step, noise: plain(noise), run)
    for rank in (0, 1):
        write_stacks(folder, rank, COMMON, (frame, phase, "runs", 8.0), ("main", "backward", "runs", 1.0))
    told = [one for one in causes(judge(load_run(folder, "run"))) if "fp64" in one.subject]
    assert [one.ms for one in told] == ([] if ms is None else [pytest.approx(ms * 32 / 39, rel=0.1)])
    for cause in told:
        assert cause.subject.startswith("work in fp64 in augment(), straggler.py:5")
        assert cause.interval_ms[1] >= 8.0 * 32 / 39
        assert any("are cast from fp64 there" in text for text in cause.evidence)


def test_who_has_the_cores_that_are_taken_is_measured(tmp_path):
    """Of 2 cores a rank has half a one, and 1.5 are others'."""
    modes = {"num_threads": 1, "num_cores": 2, "idle_cores": 0.0, "own_cores": 0.5}
    run = run_record(1, program={"modes": modes})

    def make(rank, step, noise):
        return Host().work(30.0), {"world_size": 1, "host_use": HostUse(15.0, 15.0, 15.0)}

    [cause] = causes(judge(load_run(run_of(tmp_path / "run", make, run, width=1), "run")))
    assert cause.kind == "core_taken"
    assert "of 2 cores the ranks had 0.500 and other processes 1.50" in cause.evidence[0]


def test_cores_that_one_process_leaves_out_are_a_cause_though_it_says_so(tmp_path):
    """30 ms of compute, 0.7 of half of them; beside another thread it is a sentence, and not of nothing."""
    modes = {"num_threads": 1, "num_whole_cores": 2, "num_cores": 2, "threads_at": (TRAIN, 7)}
    run = run_record(1, work=WorkOfStep(flops=1.0, lines=[]))
    run.program = {"modes": modes}

    def make(rank, step, noise):
        return Host().work(30.0 * noise.gauss(1, 0.01)), {"world_size": 1}

    folder = run_of(tmp_path / "run", make, run, width=1)
    [cause] = found_causes(judge(load_run(folder, "run"))).listed
    assert cause.headline.startswith("cores that idle in train.py:7: 10.5 ms a step, 35 % [")
    assert cause.interval_ms[1] <= 15.0  # what two threads save of all of it
    assert cause.change.startswith("torch.set_num_threads(2) at train.py:7, or leave it out there")
    run.work = WorkOfStep()  # not counted: its operators may all be small
    [cause] = found_causes(judge(load_run(run_of(tmp_path / "uncounted", make, run, width=1), "run"))).listed
    assert cause.headline == "cores that idle in train.py:7: at most 10.5 ms a step, 35 %"
    run.work = WorkOfStep(flops=1.0, lines=[])
    run.environment = {"OMP_NUM_THREADS": "1"}
    [cause] = found_causes(judge(load_run(run_of(tmp_path / "of_one", make, run, width=1), "run"))).listed
    assert cause.change.endswith("without it torch takes the 1 of OMP_NUM_THREADS in the environment")
    write_stacks(folder, 0, COMMON, ("task", "forward", "locked_out", 1.0))
    single = dataset("run", [judge(load_run(folder, "run"))])
    told = found_causes(single.first)
    assert [text.partition(",")[0] for text in told.no_loss] == ["The program sets torch's threads itself"]
    assert "Nothing worth changing" not in nothing_text(single, told)


@pytest.mark.parametrize(
    ("cores", "around", "world_size", "ms"),
    [
        pytest.param(1, 4, 1, 0.7 * 0.75 * 30, id="to-one-of-four"),
        pytest.param(1, 4, 2, None, id="as-ranks-are"),
        pytest.param(1, 1, 1, None, id="to-all"),
        pytest.param(1, None, 1, None, id="nobody-tells"),
        pytest.param(None, None, 1, None, id="nobody-looked"),
    ],
)
def test_a_process_alone_that_is_bound_to_few_cores_is_told_to_use_all(
    tmp_path, cores, around, world_size, ms
):
    modes = {"num_threads": 1, "num_cores": cores, "num_cores_around": around, "bound_at": (TRAIN, 2)}
    run = run_record(world_size, work=WorkOfStep(flops=1.0, lines=[]), program={"modes": modes})

    def make(rank, step, noise):
        return Host().work(30.0 * noise.gauss(1, 0.01)), {"world_size": world_size}

    named = causes(judge(load_run(run_of(tmp_path / "run", make, run, width=world_size), "run")))
    assert [(cause.ms, cause.limit) for cause in named] == (
        [] if ms is None else [(pytest.approx(ms, rel=0.01), "at most")]
    )
    for cause in named:
        assert cause.subject == "3 cores that the process is bound away from in train.py:2"
        assert "let the process use all 4 cores" in cause.change


@pytest.mark.parametrize(
    ("within", "workers", "kinds"),
    [
        pytest.param(True, 0, ["data_loading"], id="while-this-process-makes-a-batch"),
        pytest.param(False, 0, ["data_loading", "garbage_collection"], id="elsewhere"),
        pytest.param(True, 2, ["data_loading", "garbage_collection"], id="while-workers-make-it"),
    ],
)
def test_garbage_is_of_the_batches_that_it_is_collected_for(tmp_path, within, workers, kinds):
    """A batch takes 8 ms, and every second one 20 ms more, in which Python collects garbage."""

    def make(rank, step, noise):
        host, collects = Host(), 20.0 * (step % 2)
        at = 2.0 if within else 10.0
        host.host += [HostSpan("garbage_collection", at, at + collects)] * (collects > 0)
        host.host.append(HostSpan("data", 0.0, 8.0 + within * collects))
        host.at = 8.0 + collects
        return host.work(30.0 * noise.gauss(1, 0.01)).comm(0.5), {"source": "kernels"}

    loaders = [{"num_workers": workers, "site": "train.py:3"}]
    folder = run_of(tmp_path / "run", make, run_record(2, program={"loaders": loaders}))
    found = causes(judge(load_run(folder, "run")))
    assert sorted(one.kind for one in found) == kinds
    if len(kinds) == 1:
        assert found[0].ms == pytest.approx(18.0, rel=0.05)
        assert any(text.startswith("with 10.0 ms of full garbage collections") for text in found[0].evidence)


@pytest.mark.parametrize(
    ("cores", "at", "late_ms", "ms"),
    [
        pytest.param(1, (TRAIN, 2), 12.0, 12.0, id="to-one-core"),
        pytest.param(8, (TRAIN, 2), 12.0, None, id="to-a-part-for-each-rank"),
        pytest.param(1, None, 12.0, None, id="by-what-started-it"),
        pytest.param(1, (TRAIN, 2), 0.5, None, id="whose-one-core-is-free"),
    ],
)
def test_ranks_that_bind_themselves_to_one_core_beside_a_device_are_told_so(tmp_path, cores, at, late_ms, ms):
    """The device idles for 12 ms of 40, while the thread that launches waits for a core for 12."""
    modes = {
        "num_threads": 1,
        "num_cores": cores,
        "num_cores_around": 16,
        "num_local_ranks": 2,
        "bound_at": at,
    }

    def make(rank, step, noise):
        host = Host().idle(12.0 * noise.gauss(1, 0.01)).work(27.0).comm(1.0)
        return host, {"source": "kernels", "host_use": HostUse(40.0 - late_ms, late_ms)}

    folder = run_of(tmp_path / "run", make, run_record(2, program={"modes": modes}))
    told = [one for one in causes(judge(load_run(folder, "run"))) if "bound away from" in one.subject]
    assert [(one.ms, one.limit) for one in told] == (
        [] if ms is None else [(pytest.approx(ms, rel=0.1), "at most")]
    )
    for cause in told:
        assert cause.change.startswith(
            "let each rank, and the workers that its loader starts, use 8 of the 16 cores"
        )


def test_a_loop_between_the_model_and_its_loss_costs_what_was_timed(tmp_path):
    run = run_record(2, loss_loop=LossLoop(operators=120, ms=6.0))
    (cause,) = found(tmp_path / "run", lambda rank, step, noise: plain(noise), run)
    assert cause.ms == pytest.approx(6.0, rel=0.01)
    assert "_foreach_" in cause.change


@pytest.mark.parametrize("is_timed", [True, False])
def test_a_loss_by_hand_costs_what_it_moves_beyond_one_function(is_timed, tmp_path):
    """Of 20 MB 5, as far as it was timed."""
    loop = LossLoop(operators=12, ms=6.0 if is_timed else None, bytes=20e6, least_bytes=5e6)
    causes_of = found(tmp_path / "run", lambda rank, step, noise: plain(noise), run_record(2, loss_loop=loop))
    told = [cause for cause in causes_of if "made by hand" in cause.subject]
    assert [cause.ms for cause in told] == ([pytest.approx(6.0 * 0.75, rel=0.01)] if is_timed else [])
    assert all("cross_entropy with label_smoothing" in cause.change for cause in told)


def test_transforms_by_a_large_prime_cost_most_of_what_they_take(tmp_path):
    """On a CPU 0.5 to 0.91 of 12 ms forward and, of half of them, 6 backward."""
    transforms = FourierTransforms(
        num=8, length=20_799, prime=2_311, with_gradient=0.5, ms=12.0, at=StackFrame("a.py", 3, "f", True)
    )
    run = run_record(2, work=WorkOfStep(transforms=transforms))
    (cause,) = found(tmp_path / "run", lambda rank, step, noise: plain(noise), run)
    assert cause.ms == pytest.approx(18.0 * math.sqrt(0.5 * 0.91), rel=0.02)
    assert cause.interval_ms[0] <= 18.0 * 0.5 < 18.0 * 0.91 <= cause.interval_ms[1]
    assert cause.subject == "8 Fourier transforms of length 20,799 in f(), a.py:3"
    assert cause.change.startswith("make 20,799 a product of small primes, 21,600:")
    assert cause.change.endswith(": at f(), a.py:3")


@pytest.mark.parametrize("is_timed", [True, False])
def test_operators_on_weights_have_their_part_of_what_is_timed_before_the_loss(is_timed, tmp_path):
    """20 of 25 MB of 5 ms; where nobody timed them, 20 MB at 4 GB/s."""
    loop = LossLoop(operators=12, ms=5.0 if is_timed else None, bytes=25e6, weights_bytes=20e6, parameters=3)
    run = run_record(2, loss_loop=loop)
    (cause,) = found(tmp_path / "run", lambda rank, step, noise: plain(noise), run)
    assert cause.ms == pytest.approx(4.0 if is_timed else 5.0, rel=0.01)
    assert cause.subject.startswith("operators on 3 parameters")
    assert "weight_decay" in cause.change


@pytest.mark.filterwarnings("error")
def test_a_rank_without_compute_loses_nothing_to_a_low_clock(tmp_path):
    """No kernel of it is in the steps that were held down: 0 of 0 ms."""

    def make(rank, step, noise):
        host, device = low_clock(rank, step, noise)
        host = Host().idle(30.0).comm(2.0) if device["device"].throttling else host
        return host, device | {"source": "kernels"}

    assert "clock" not in {cause.kind for cause in found(tmp_path / "run", make, GPU_RUN)}


def gathers_and_saves(rank, step, noise):
    """Every fifth step all ranks collect for 40 ms what rank 0 writes in 20: 12 ms a step in all."""
    if step % 5:
        return plain(noise)
    host = Host().work(70.0)
    return host.work(20.0, "checkpoint", "save in a.py:7").comm(2.0) if rank == 0 else host.comm(22.0)


def test_a_checkpoint_costs_all_that_its_steps_take_longer(tmp_path):
    (cause,) = found(tmp_path / "run", gathers_and_saves)
    assert (cause.kind, cause.line.text) == ("checkpoint", "a.py:7")
    assert cause.ms == pytest.approx(12.0, rel=0.15)


@pytest.mark.parametrize(
    ("units", "kinds"),
    [
        ([], ["transfer"]),
        ([{"times": 4, "reshard_after_forward": True}], ["no_prefetch"]),
        ([{"times": 4, "reshard_after_forward": False}], []),
    ],
)
def test_gathers_are_prefetched_where_units_are(tmp_path, units, kinds):
    """A program without any gathers activations, which are there no sooner; where what helps on a CPU is in
    force, so small a loss is no cause."""
    run = run_record(2, program={"loaders": [], "units": units})
    assert [cause.kind for cause in found(tmp_path / "run", bare_gathers, run)][:1] == kinds


def pause_of_one_beside_noise(rank, step, noise):
    """Rank 0 pauses 20 ms behind each step; rank 1 is later by chance, more than that in every other step."""
    late_ms = random.Random(step).uniform(0.0, 46.0)
    if rank == 1:
        return Host().work(30.0 + late_ms).comm(2.0 + max(20.0 - late_ms, 0.0)).after(0.1)
    return Host().work(30.0).comm(2.0 + max(late_ms - 20.0, 0.0)).after(20.0)


def test_what_one_rank_does_in_every_step_is_sure_though_another_is_late_in_some(tmp_path):
    kinds = {(cause.kind, cause.rank) for cause in found(tmp_path / "run", pause_of_one_beside_noise)}
    assert ("between_steps", 0) in kinds


def test_one_process_needs_no_words_on_its_rank(tmp_path):
    folder = run_of(tmp_path / "run", lambda rank, step, noise: _with_data(noise), run_record(1), width=1)
    first = causes(judge(load_run(folder, "run")))[0]
    assert first.subject == "data loading"
    assert not any("on the rank" in text for text in first.evidence)


def _with_data(noise):
    return Host().work(9.0, "data").work(30.0 * noise.gauss(1, 0.01)), {"world_size": 1}


@pytest.mark.parametrize(
    ("leaf", "part"), [("_Orthogonal.forward", 0.75), ("_WeightNorm.forward", 0.75), ("Linear.forward", 0.0)]
)
def test_what_a_line_computes_weights_with_is_told_by_its_samples(monkeypatch, leaf, part):
    """3 of 4 ms of a line; operators alone would have a small and a large one count alike."""
    at, other = StackFrame("a.py", 3, "Cell.forward", True), StackFrame("a.py", 4, "Cell.forward", True)
    inside, linear = (StackFrame("torch", 0, name, False) for name in (leaf, "Linear.forward"))
    stacks = [
        SimpleNamespace(frames=[line, of_torch], ms=ms)
        for line, of_torch, ms in ((at, inside, 3.0), (at, linear, 1.0), (other, inside, 5.0))
    ]
    samples = SimpleNamespace(is_judged=None, chosen=lambda _: stacks)
    monkeypatch.setattr(needless, "samples_of_ranks", lambda _: [samples])
    assert needless._part_of_weights(SimpleNamespace(whole=None), at) == (part, bool(part))
