"""Sampled stacks: the late rank against the others, slow steps against usual ones, trees that are drawn."""

import msgspec
import numpy as np
import pytest

from aorta.account.judge.profiles import (
    busiest,
    differences,
    line_text,
    most,
    part_of,
    rank_parts,
    slow_and_usual,
    told_differences,
    tree,
)
from aorta.account.judge.stacks import samples_of, timed_samples_of
from aorta.records.stacks import STACK_PHASES, StackFrame
from tests.account.judge.sampled_runs import (
    AUGMENT,
    BACKWARD,
    ENGINE,
    MAIN,
    MODEL,
    SLEEP,
    TRAINER,
    sampled,
    sampled_dataset,
)

STEPS = range(2, 12)
"""The judged ones of twelve."""


def backward(us, *steps):
    return [(step, us, "runs", MAIN, BACKWARD) for step in steps]


def asleep(us, *steps):
    return [(step, us, "sleeps", MAIN, AUGMENT, SLEEP) for step in steps]


def in_engine(us, *steps):
    """In the phase of backward passes."""
    return [(step, us, "sleeps", MAIN, ENGINE) for step in steps]


def slow_run(stacks, slow, num=40):
    """Slow steps take 30 ms more."""
    judged = sampled_dataset([stacks], num_steps=num).first
    lengths = np.array(judged.metrics["step_ms"])
    lengths[:, list(slow)] += 30.0
    return msgspec.structs.replace(judged, metrics={**judged.metrics, "step_ms": lengths})


@pytest.fixture
def late_rank():
    """Both ranks run backward; rank 1 sleeps for a third of its samples."""
    by_rank = [
        sampled(*backward(30_000, *STEPS)),
        sampled(*backward(20_000, *STEPS), *asleep(10_000, *STEPS)),
    ]
    return sampled_dataset(by_rank).first


def step_ms(judged, rank):
    return float(judged.values("step_ms")[rank].mean())


def test_what_the_late_rank_does_and_the_others_do_not(late_rank):
    (told,) = told_differences(late_rank, 1)
    assert told.title == "rank 1 against the others"
    more, less = told.lines
    assert (more.text, more.doing, more.calls) == ("augment(), data.py:5", "sleeps", "sleep of time")
    assert more.difference_ms == pytest.approx(step_ms(late_rank, 1) / 3)
    assert less.text == "main(), train.py:20"
    assert less.difference_ms == pytest.approx(2 / 3 * step_ms(late_rank, 1) - step_ms(late_rank, 0))
    assert line_text(more).startswith(
        f"+{more.ms:.1f} ms in augment(), data.py:5 (the thread sleeps in sleep"
    )


def test_without_a_late_rank_there_is_no_difference(late_rank):
    assert told_differences(late_rank, None) == []


def test_the_lines_that_the_thread_is_in_most(late_rank):
    """Means over two ranks, of which one sleeps for a third of its step."""
    first, second = busiest(late_rank, 4)
    assert (first.text, second.text) == ("main(), train.py:20", "augment(), data.py:5")
    assert second.ms == pytest.approx(step_ms(late_rank, 1) / 3 / 2)
    assert line_text(second, is_difference=False).endswith("(the thread sleeps in sleep of time): 10 samples")


def test_what_few_samples_saw_is_no_busy_line():
    stacks = sampled(*backward(30_000, *STEPS), *asleep(30_000, 3, 4))
    assert [line.text for line in busiest(sampled_dataset([stacks]).first, 4)] == ["main(), train.py:20"]


def test_a_difference_that_chance_can_make_is_not_told():
    """One sample in ten more or less on either side."""
    by_rank = [
        sampled(*backward(10_000, *STEPS), *asleep(10_000, 3, 4, 5, 6)),
        sampled(*backward(10_000, *STEPS), *asleep(10_000, 3, 4, 5, 6, 7, 8)),
    ]
    parts = rank_parts(sampled_dataset(by_rank).first)
    assert differences([parts[1]], [parts[0]], 40.0) == []


def test_slow_steps_against_usual_ones():
    """Every fourth step takes 30 ms more, in augment()."""
    num = 40
    slow = range(0, num, 4)
    stacks = sampled(*backward(40_000, *range(num)), *asleep(30_000, *slow))
    judged = slow_run(stacks, slow)
    lengths = judged.metrics["step_ms"]
    told = told_differences(judged, None)[0]
    assert told.title == "slow steps (every fourth step) against usual ones"
    assert told.lines[0].text == "augment(), data.py:5"
    of_slow = lengths[:, [step for step in slow if step >= judged.num_warmup]].mean()
    assert told.lines[0].ms == pytest.approx(30 / 70 * of_slow)
    parts, usual, often = slow_and_usual(judged)
    assert (len(parts), len(usual), often) == (1, 1, "every fourth step")


@pytest.mark.parametrize("is_busy", [True, False])
def test_steps_that_wait_for_a_busy_device_are_not_slow_for_their_line(is_busy):
    """The host is ahead, and every fourth step reads a loss."""
    item, slow = StackFrame("", 0, "item", is_program=False), range(0, 40, 4)
    waits = [(step, 30_000, "runs", MAIN, AUGMENT, item) for step in slow]
    judged = slow_run(sampled(*backward(40_000, *range(40)), *waits), slow)
    lengths = judged.metrics["step_ms"]
    busy = {"compute_ms": lengths - 2.0, "exposed_ms": np.full_like(lengths, 1.0)}
    idle_ms = np.full_like(lengths, 1.0) if is_busy else judged.metrics["idle_ms"]
    metrics = judged.metrics | (busy if is_busy else {}) | {"idle_ms": idle_ms}
    judged = msgspec.structs.replace(judged, metrics=metrics)
    told = [line.text for one in told_differences(judged, None) for line in one.lines]
    assert told == ([] if is_busy else ["augment(), data.py:5"])
    assert [line.doing for line in busiest(judged, 4)][-1] == ("waits" if is_busy else "runs")


def test_what_every_step_has_is_not_compared_where_one_side_has_no_sample_of_it():
    """All samples of slow steps fell into augment(): that they had no backward pass is not known."""
    slow = range(0, 40, 4)
    usual = [step for step in range(40) if step not in slow]
    judged = slow_run(sampled(*in_engine(40_000, *usual), *asleep(70_000, *slow)), slow)
    (told,) = told_differences(judged, None)
    (line,) = told.lines
    assert line.text == "augment(), data.py:5"
    assert f" {line.ms:.1f} against none sampled, " in line_text(line)


def test_what_slow_steps_do_less_is_not_told():
    """They have 10 ms in main() instead of 40, and are none the longer for it."""
    slow = [*range(0, 40, 4)]
    usual = [step for step in range(40) if step not in slow]
    stacks = sampled(*backward(5_000, *usual * 8, *slow * 2), *asleep(60_000, *slow))
    (told,) = told_differences(slow_run(stacks, slow), None)
    assert [line.text for line in told.lines] == ["augment(), data.py:5"]


@pytest.mark.parametrize(
    ("num", "is_told"), [pytest.param(3, False, id="few"), pytest.param(10, True, id="many")]
)
def test_a_side_with_few_samples_may_have_missed_a_line(num, is_told):
    """None of three falls into a third of a step by chance, 0.3 times; none of ten 0.02 times."""
    by_rank = [
        sampled(*backward(30_000, *[*STEPS][:num])),
        sampled(*backward(20_000, *STEPS), *asleep(10_000, *STEPS)),
    ]
    parts = rank_parts(sampled_dataset(by_rank).first)
    found = [line.text for line in differences([parts[1]], [parts[0]], 40.0)]
    assert ("augment(), data.py:5" in found) is is_told


def test_a_line_that_calls_a_library_s_loop_is_told_for_each_phase_of_it():
    """Trainer.train has half of the time in backward passes, and the other half in a model's three functions:
    none of these is the one that the thread is in."""
    functions = [msgspec.structs.replace(TRAINER, function=name) for name in ("log", "prepare", "save")]
    loop = [(step, 5_000, "runs", MAIN, TRAINER, MODEL, leaf) for step in STEPS for leaf in functions]
    passes = [(step, 15_000, "sleeps", MAIN, TRAINER, ENGINE) for step in STEPS]
    judged = sampled_dataset([sampled(*loop, *passes)]).first
    of_calls = {line.calls: line.ms for line in busiest(judged, 4) if line.text == "main(), train.py:20"}
    half_ms = pytest.approx(step_ms(judged, 0) / 2)
    assert of_calls == {"": half_ms, "_engine_run_backward of torch": half_ms}


def test_a_rank_whose_judged_steps_have_no_length_has_no_samples_of_them(late_rank):
    """It was killed in its first steps."""
    step_ms = np.array(late_rank.metrics["step_ms"])
    step_ms[0] = np.nan
    judged = msgspec.structs.replace(late_rank, metrics={**late_rank.metrics, "step_ms": step_ms})
    assert [*rank_parts(judged)] == [1]
    assert part_of(judged, 1, judged.values("step_ms")[0] > 0) is None


def test_lines_with_most_time_add_up_to_the_step(late_rank):
    parts = rank_parts(late_rank)
    lines = most([*parts.values()], 10)
    assert sum(line.ms for line in lines) == pytest.approx(
        (step_ms(late_rank, 0) + step_ms(late_rank, 1)) / 2
    )


def test_a_tree_holds_each_part_s_step_and_joins_alike_stacks(late_rank):
    parts = rank_parts(late_rank)
    whole = tree([*parts.values()], most_nodes=100)
    assert whole.frames == [None, MAIN, BACKWARD, AUGMENT, SLEEP]
    assert whole.parents == [-1, 0, 1, 1, 3]
    assert whole.total_ms[:, 0] == pytest.approx([step_ms(late_rank, 0), step_ms(late_rank, 1)])
    assert whole.ms[:, 4] == pytest.approx([0.0, step_ms(late_rank, 1) / 3])
    assert whole.asleep_ms[4] == pytest.approx(whole.ms[:, 4].sum())


def test_nodes_that_do_not_fit_count_as_their_callers(late_rank):
    whole = tree([*rank_parts(late_rank).values()], most_nodes=3)
    assert whole.frames == [None, MAIN, BACKWARD]
    assert whole.total_ms[:, 0] == pytest.approx([step_ms(late_rank, 0), step_ms(late_rank, 1)])
    assert whole.ms[1, 1] == pytest.approx(step_ms(late_rank, 1) / 3)


def test_samples_of_rare_long_steps_take_the_time_that_these_have():
    """Steps of 100 ms more come five times in 50; samples see less than half as much of them as there is."""
    num, slow = 50, [*range(4, 50, 10)]
    stacks = sampled(*backward(40_000, *range(num)), *asleep(40_000, *slow))
    judged = sampled_dataset([stacks], num_steps=num).first
    lengths = np.array(judged.metrics["step_ms"])
    lengths[:, slow] += 100.0
    judged = msgspec.structs.replace(judged, metrics={**judged.metrics, "step_ms": lengths})
    samples = samples_of(judged, 0)
    in_slow = np.isin(samples.column, np.array(slow) - judged.num_warmup)
    assert samples.ms[in_slow].sum() == pytest.approx(lengths[0, slow].sum() / judged.num_judged)
    assert samples.ms[samples.is_judged].sum() == pytest.approx(step_ms(judged, 0))


def test_lines_of_a_phase_have_no_more_than_its_spans_show():
    """Half of the samples are in a loader, whose spans are a quarter of the step."""
    stacks = sampled(*backward(20_000, *STEPS), *asleep(20_000, *STEPS))
    of_data = STACK_PHASES.index("data")
    stacks.samples = [
        msgspec.structs.replace(one, phase=of_data if one.doing else one.phase) for one in stacks.samples
    ]
    judged = sampled_dataset([stacks]).first
    spans = {f"host.phase.{name}": np.full((1, 12), ms) for name, ms in {"step": 40.0, "data": 10.0}.items()}
    lines = busiest(msgspec.structs.replace(judged, host_parts=spans), 4)
    shares = {line.text: line.ms / step_ms(judged, 0) for line in lines}
    assert shares == pytest.approx({"main(), train.py:20": 3 / 4, "augment(), data.py:5": 1 / 4})


@pytest.mark.parametrize(
    ("spans_show_ms", "backward_share"),
    [
        pytest.param({"step": 40.0, "backward": 20.0}, 1 / 2, id="spans-tell-how-long-a-backward-pass-is"),
        pytest.param(
            {"step": 40.0, "backward": 10.0, "optimizer": 10.0}, 2 / 3, id="no-sample-of-an-optimizer"
        ),
        pytest.param({}, 2 / 3, id="no-spans"),
    ],
)
def test_samples_of_a_phase_take_the_part_of_the_step_that_spans_show(spans_show_ms, backward_share):
    stacks = sampled(*backward(20_000, *STEPS), *asleep(10_000, *STEPS))
    of_backward = STACK_PHASES.index("backward")
    stacks.samples = [
        sample if sample.us == 10_000 else msgspec.structs.replace(sample, phase=of_backward)
        for sample in stacks.samples
    ]
    judged = sampled_dataset([stacks]).first
    spans = {f"host.phase.{phase}": np.full((1, 12), ms) for phase, ms in spans_show_ms.items()}
    samples = timed_samples_of(msgspec.structs.replace(judged, host_parts=spans), 0)
    mean_ms = step_ms(judged, 0)
    assert samples.ms[samples.in_phase("backward")].sum() == pytest.approx(backward_share * mean_ms)
    assert samples.ms.sum() == pytest.approx(mean_ms)
