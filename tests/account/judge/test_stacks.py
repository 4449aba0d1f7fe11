"""The line of the program in which most of some samples are."""

import msgspec
import pytest

from aorta.account.judge.judged import judge
from aorta.account.judge.phases import line_after_last_step
from aorta.account.judge.stacks import WeightedStack, heaviest, is_a_loss, samples_of
from aorta.account.judge.stacks import sampled as sampled_of
from aorta.records.schema import WorkOfStep
from aorta.records.stacks import PLACES, StackFrame
from aorta.why.causes.text import seen_text
from tests.account.judge.sampled_runs import ENGINE, MODEL, sampled, sampled_dataset

MAIN = StackFrame("/job/train.py", 20, "main", is_program=True)
OTHER_LINE = StackFrame("/job/train.py", 25, "main", is_program=True)
BACKWARD = StackFrame("torch", 0, "Tensor.backward", is_program=False)


def at(line, function="augment", file="/job/data.py"):
    return StackFrame(file, line, function, is_program=True)


def stack(ms, *frames, doing="runs"):
    return WeightedStack([*frames], ms, doing)


@pytest.mark.parametrize(("file", "function", "is_one"), [
    ("torch", "CrossEntropyLoss.forward", True),
    ("", "torch.log_softmax", True),
    ("", "F.nll_loss", True),
    ("", "torch.softmax", False),
    ("", "history.loss", False),
])  # fmt: skip
def test_functions_of_a_loss(file, function, is_one):
    assert is_a_loss(StackFrame(file, 0, function, is_program=False)) == is_one


def test_the_innermost_function_that_holds_most_and_its_line_with_most_of_it():
    found = heaviest(
        [
            stack(2.0, MAIN, at(4)),
            stack(3.0, MAIN, at(5)),
            stack(2.0, MAIN, at(6)),
            stack(3.0, MAIN, BACKWARD),
        ]
    )
    assert (found.text, found.caller, found.ms, found.part) == (
        "augment(), data.py:5",
        "main(), train.py:20",
        7.0,
        0.7,
    )
    assert found.lines == ((5, 3 / 7), (4, 2 / 7), (6, 2 / 7))
    assert seen_text(found).startswith(
        "70 % of it was sampled in augment(), data.py:5, 30 % in this line, 20 % in :4, 20 % in :6 (3 samples"
    )


def test_where_callees_share_the_time_it_is_the_line_that_calls_them():
    found = heaviest(
        [stack(3.0, MAIN, at(4)), stack(3.0, MAIN, at(9, "log")), stack(3.0, MAIN, at(7, "save"))]
    )
    assert found.text == "main(), train.py:20"


def test_a_library_s_function_is_told_with_the_line_that_calls_it():
    found = heaviest([stack(3.0, MAIN, BACKWARD), stack(1.0, OTHER_LINE)])
    assert (found.text, found.calls) == ("main(), train.py:20", "Tensor.backward of torch")


def test_a_comprehension_is_a_part_of_its_function():
    inner = at(8, "augment.<locals>.<listcomp>")
    found = heaviest([stack(3.0, MAIN, at(8), inner), stack(1.0, MAIN, at(9))])
    assert (found.text, found.function) == ("augment(), data.py:8", "augment")


def test_what_others_do_too_is_taken_away():
    others = [stack(-9.0, MAIN, BACKWARD), stack(-1.0, MAIN, at(5))]
    found = heaviest([stack(9.0, MAIN, BACKWARD), stack(5.0, MAIN, at(5), doing="sleeps"), *others])
    assert (found.text, found.doing, found.ms) == ("augment(), data.py:5", "sleeps", 4.0)


def test_it_is_what_calls_the_model_once_more_and_not_the_model():
    """The others call it in their passes, and never sample()."""
    forward = at(30, "forward", "/job/model.py")
    found = heaviest([stack(9.0, MAIN, at(37, "sample"), forward), stack(-2.0, MAIN, forward)])
    assert (found.text, found.caller, found.num_samples) == ("sample(), data.py:37", "main(), train.py:20", 1)


def test_nothing_is_found_where_nothing_is_lost_or_no_line_is_the_program_s():
    assert heaviest([]) is None
    assert heaviest([stack(1.0, MAIN), stack(-2.0, MAIN)]) is None
    assert heaviest([stack(1.0, BACKWARD)]) is None


@pytest.mark.parametrize(("pandas_ms", "told"), [(2.0, "_iloc of pandas"), (0.5, "torch.stack")])
def test_of_what_holds_pythons_lock_few_samples_tell_what_a_line_calls(pandas_ms, told):
    rows, joined = (
        StackFrame(file, 0, name, False) for file, name in (("pandas", "_iloc"), ("", "torch.stack"))
    )
    found = heaviest([stack(8.0 - pandas_ms, MAIN, joined), stack(pandas_ms, MAIN, rows)])
    assert found.calls == found.entry == told


def test_what_another_line_of_the_function_calls_is_not_what_this_one_does():
    """A metric is called as torch's module, and a value is logged by Lightning one line below."""
    called = StackFrame("torch", 0, "Module._wrapped_call_impl", False)
    curve = StackFrame("torchmetrics", 0, "_binary_clf_curve", False)
    log = StackFrame("lightning", 0, "LightningModule.log", False)
    found = heaviest([stack(3.0, MAIN, at(5), called, curve), stack(1.0, MAIN, at(6), log)])
    assert (found.text, found.entry) == ("augment(), data.py:5", "Module._wrapped_call_impl of torch")


@pytest.mark.parametrize(
    ("line", "library", "zeroed_bytes", "is_moved"),
    [
        pytest.param(18, "draw", 0.0, True, id="python-before-it"),
        pytest.param(18, "draw", 1e6, False, id="which-fills-gradients"),
        pytest.param(18, "backward", 0.0, False, id="a-pass-before-it"),
        pytest.param(22, "draw", 0.0, False, id="nothing-before-it"),
    ],
)
def test_samples_in_zero_grad_are_of_the_line_before_it(line, library, zeroed_bytes, is_moved):
    """Which holds Python's lock: zero_grad() lets go of it first."""
    zero_grad = (MAIN, StackFrame("torch", 0, "Optimizer.zero_grad", False))
    called = ENGINE if library == "backward" else StackFrame("python", 0, "Random.sample", False)
    before = (at(line, "main", MAIN.file), called)
    steps = [(step, 1000, "runs", *(before if step % 3 == 0 else zero_grad)) for step in range(2, 12)]
    run = sampled_dataset([sampled(*steps)]).first
    run = msgspec.structs.replace(
        run, record=msgspec.structs.replace(run.noted, work=WorkOfStep(zeroed_bytes=zeroed_bytes))
    )
    samples = samples_of(run, run.ranks[0])
    in_it = samples.leaf_is(lambda leaf: leaf.function == "Optimizer.zero_grad")
    assert in_it.any() == (not is_moved)


def test_of_a_line_alone_what_it_calls_of_the_program_is_left_out():
    """A line that calls two layers, one in the other, and a head of torch's."""
    line, layer = at(4, "Net.forward"), at(9, "Layer.forward")
    linear = StackFrame("torch", 0, "Linear.forward", is_program=False)
    steps = range(2, 12)
    stacks = sampled(
        *((step, 2_000, "runs", MAIN, MODEL, line, linear) for step in steps),
        *((step, 6_000, "runs", MAIN, MODEL, line, MODEL, layer, linear) for step in steps),
    )
    judged = judge(sampled_dataset([stacks]).first)
    of_line = judged, line.file, "Net.forward", range(4, 5)
    assert sum(sampled_of(*of_line)) == pytest.approx(4 * sum(sampled_of(*of_line, own=True)))


@pytest.mark.parametrize(("step", "is_counted"), [(11, False), (10, True)])
def test_what_is_behind_the_body_of_the_last_step_is_no_part_of_a_step(step, is_counted):
    """A trainer closes for ten seconds there. Twelve steps; behind the body of another one it counts."""
    save = StackFrame("torch", 0, "Module.cpu", is_program=False)
    stacks = sampled(
        *((one, 1000, "runs", MAIN, MODEL) for one in range(2, 12)), (step, 9000, "runs", MAIN, save)
    )
    stacks.samples[-1] = msgspec.structs.replace(stacks.samples[-1], place=PLACES.index("behind_body"))
    run = sampled_dataset([stacks]).first
    samples = samples_of(run, run.ranks[0])
    assert (samples.is_judged & samples.leaf_in("torch") & ~samples.in_phase("forward")).any() == is_counted


def test_what_is_behind_the_last_step_has_its_line():
    closes = StackFrame("lightning_fabric", 0, "batch_to", is_program=False)
    stacks = sampled(
        *((one, 1000, "runs", MAIN, MODEL) for one in range(2, 12)),
        *((11, 3000, "runs", OTHER_LINE, closes),) * 3,
    )
    stacks.samples[-3:] = [
        msgspec.structs.replace(one, place=PLACES.index("behind_body")) for one in stacks.samples[-3:]
    ]
    line = line_after_last_step(sampled_dataset([stacks]).first)
    assert (line.text, line.calls) == ("main(), train.py:25", "batch_to of lightning_fabric")
