"""The line of the program that a cause names, by stacks written beside a run with a known loss."""

import ast
import math
import os
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from aorta.account.cause import CodeLine
from aorta.account.judge.cells import account_of
from aorta.account.judge.judged import dataset, judge
from aorta.account.load.open import load_run
from aorta.account.model import Causes
from aorta.records.files import sites_name
from aorta.records.schema import (
    CallSite,
    CallSites,
    HostSpan,
    HostUse,
    KernelSums,
    LineOfWork,
    WorkOfStep,
)
from aorta.records.stacks import STACK_PHASES, StackFrame
from aorta.why.causes.code_lines import (
    calls_model,
    holds_hooks,
    is_dispatched,
    sends_own_data,
    waiting_calls,
    waiting_line,
    waits_text,
)
from aorta.why.causes.finding import CauseFinding
from aorta.why.causes.losses import program_code
from aorta.why.causes.losses.program_code import _python_at, code_in_passes
from aorta.why.causes.rank import found_causes
from aorta.why.causes.source import Source
from aorta.why.causes.text import causes_text, nothing_text
from tests.account.judge.sampled_runs import AUGMENT, ENGINE, MAIN, MODEL, sampled, sampled_dataset
from tests.records.run_folders import run_record
from tests.why.causes.runs import GPU_RUN, STEPS, Host, causes, many_small, plain, run_of, slow_loader, waited
from tests.why.causes.stacks import COMMON, FRAMES, TRAIN, write_stacks


def first_cause(folder):
    return causes(judge(load_run(folder, "run")))[0]


def late(rank, step, noise):
    return waited(8.0, rank, step, noise)


def test_a_late_rank_is_named_with_what_it_does_and_the_others_do_not(tmp_path):
    folder = run_of(tmp_path, late)
    loses = next(cause for cause in [first_cause(folder)])
    for rank in (0, 1):
        own = [("augment", "rest", "sleeps", 8.0)] if rank == loses.rank else []
        write_stacks(folder, rank, COMMON, *own)
    cause = first_cause(folder)
    assert cause.line.text == "augment(), straggler.py:5"
    assert cause.headline.startswith(
        f"waiting for rank {cause.rank}, which sleeps in augment(), straggler.py:5: "
    )


def test_a_rank_that_calls_its_model_once_more_now_and_then_is_in_that_line(tmp_path):
    def make(rank, step, noise):
        return waited(40.0 if step % 5 == 0 else 0.0, rank, step, noise)

    folder = run_of(tmp_path, make)
    for rank in (0, 1):
        own = [("getitem", "forward", "runs", 40.0, 5)] if rank == 1 else []
        write_stacks(folder, rank, COMMON, ("main", "forward", "runs", 10.0), *own)
    cause = first_cause(folder)
    assert (cause.kind, cause.rank, cause.line.text) == ("late_rank", 1, "Rows.__getitem__(), data.py:7")


def test_a_thread_that_holds_the_interpreter_s_lock_on_one_rank_is_named(tmp_path):
    folder = run_of(tmp_path, late)
    (late_rank,) = {cause.rank for cause in [first_cause(folder)]}
    for rank in (0, 1):
        held = [("augment", "forward", "locked_out", 8.0)] if rank == late_rank else []
        write_stacks(folder, rank, COMMON, *held)
    cause = first_cause(folder)
    assert cause.headline.startswith(
        f"another thread that holds the interpreter's lock on rank {late_rank} in augment(), straggler.py:5: "
    )
    assert cause.change.startswith("do what augment(), straggler.py:5 does in another process")
    for rank in (0, 1):  # two samples do not tell, however long
        held = [("augment", "forward", "locked_out", 16 * 8.0, 16)] if rank == late_rank else []
        write_stacks(folder, rank, COMMON, *held, steps=48)
    assert "lock" not in first_cause(folder).headline


@pytest.mark.parametrize(
    ("held", "line", "samples"),
    [
        pytest.param({"task": 1, "parse": 1, "thread": 1}, "prepare(), batches.py:12", 6, id="equal"),
        pytest.param({"task": 1, "parse": 1, "thread": 3}, "prepare(), batches.py:12", 5, id="unequal"),
        pytest.param({"task": 1, "parse": 1, "thread": 6}, None, 3, id="mostly-unseen"),
        pytest.param({"task": 2, "other_task": 1}, None, 4, id="two-threads"),
        pytest.param({"thread": 1, "receive": 1}, None, 4, id="libraries"),
    ],
)
def test_who_holds_the_interpreter_s_lock_is_what_its_thread_was_started_for(tmp_path, held, line, samples):
    """Two samples of each, with a part of 8 ms; as many equal ones as (the sum)^2 / the sum of squares."""
    folder = run_of(tmp_path, late, steps=48)
    late_rank = first_cause(folder).rank
    for rank in (0, 1):  # steps 16 and 32, of which 0 is not judged
        parts = [(name, 16 * 8.0 * part / sum(held.values())) for name, part in held.items()]
        rows = [(name, "forward", "locked_out", ms, 16) for name, ms in parts] if rank == late_rank else []
        write_stacks(folder, rank, COMMON, *rows, steps=48)
    cause = first_cause(folder)
    assert cause.subject.startswith(f"another thread that holds the interpreter's lock on rank {late_rank}")
    assert (cause.line.text if cause.line else None) == line
    assert cause.change.startswith(f"do what {line or 'that thread'} does in another process (workers of")
    low = cause.ms / cause.interval_ms[0]
    assert np.exp(1.96 / samples**0.5) <= low <= 1.2 * np.exp(1.96 / samples**0.5)


def test_operators_may_take_longer_beside_a_thread_that_holds_the_interpreter_s_lock(tmp_path):
    """However many samples tell of 8 ms on both ranks: a quarter of what they compute may go with them."""
    folder = run_of(tmp_path, lambda rank, step, noise: plain(noise))
    held = ("task", "forward", "locked_out", 8.0)
    for rank in (0, 1):
        write_stacks(folder, rank, ("backward", "backward", "runs", 24.0), held)
    judged = judge(load_run(folder, "run"))
    cause = first_cause(folder)
    compute_ms = account_of(judged).mean_ms("compute")
    assert (cause.ms, cause.line.text) == (pytest.approx(8.0, rel=0.05), "prepare(), batches.py:12")
    assert 8.0 + 0.25 * compute_ms <= cause.interval_ms[1] <= 2 * (8.0 + 0.25 * compute_ms)


@pytest.mark.parametrize("op", ["broadcast", "all_reduce"])
def test_a_rank_is_late_by_what_it_alone_is_in_while_the_others_wait_in_any_collective(tmp_path, op):
    """Rank 0 works 8 ms longer before a broadcast, and rank 1 comes 1 ms later to what follows."""

    def make(rank, step, noise):
        host = Host().work(8.0 if rank == 0 else 0.01).work(20.0)
        return host.comm(2.0 if rank == 0 else 10.0, op).work(6.0 + rank).comm(2.0 - rank)

    folder = run_of(tmp_path, make)
    for rank in (0, 1):
        own = ("augment", "rest", "runs", 8.0) if rank == 0 else ("model", "communication", "sleeps", 8.0)
        write_stacks(folder, rank, COMMON, own)
    cause = first_cause(folder)
    assert (cause.kind, cause.rank, cause.line.text) == ("late_rank", 0, "augment(), straggler.py:5")
    assert cause.ms == pytest.approx(8.0, rel=0.05)
    assert cause.change.startswith("rank 0 alone does augment(), straggler.py:5, and the others wait")
    assert "meanwhile these are in" in " ".join(cause.evidence)
    assert cause.is_waited_for
    write_sites(folder, (20, "broadcast", "a tensor", 1, 8 << 20))  # in the function that calls augment()
    dealt = first_cause(folder)
    assert dealt.change.startswith("let each rank load its own part of a batch")
    assert (dealt.rank, dealt.ms) == (0, pytest.approx(4.0, rel=0.05))  # rank 1 has to do its half


def test_what_a_rank_alone_is_in_behind_its_step_is_time_between_steps(tmp_path):
    """Rank 0 works 8 ms longer behind the update, and rank 1 waits for it in the next step."""

    def make(rank, step, noise):
        return Host().work(28.0).comm(2.0 if rank == 0 else 10.0).after(8.0 if rank == 0 else 0.01)

    folder = run_of(tmp_path, make)
    for rank in (0, 1):
        own = ("augment", "rest", "runs", 8.0) if rank == 0 else ("model", "communication", "sleeps", 8.0)
        write_stacks(folder, rank, COMMON, own, behind=("augment",))
    cause = first_cause(folder)
    assert (cause.kind, cause.rank, cause.line.text) == ("late_rank", 0, "augment(), straggler.py:5")
    table = next(text for text in cause.evidence if text.startswith("in the table"))
    assert "between steps" in table
    assert "compute" not in table


@pytest.mark.parametrize(("own", "is_own"), [("backward", False), ("compress", True)])
def test_no_rank_alone_makes_a_backward_pass_but_may_do_something_in_it(tmp_path, own, is_own):
    """Rank 0 is in it 8 ms longer, for which rank 1 waits in its own."""

    def make(rank, step, noise):
        return Host().work(30.0 + 8.0 * (rank == 0)).comm(10.0 - 8.0 * (rank == 0))

    folder = run_of(tmp_path, make)
    for rank in (0, 1):
        longer = (own, "backward", "runs", 8.0) if rank == 0 else ("backward", "backward", "sleeps", 8.0)
        write_stacks(folder, rank, ("model", "forward", "runs", 30.0), longer)
    told = causes(judge(load_run(folder, "run")))
    assert any(cause.change.startswith("rank 0 alone does compress()") for cause in told) == is_own
    assert is_own or not any(cause.change.startswith("rank 0 alone does") for cause in told)


def test_what_a_rank_alone_is_in_in_every_fourth_step_is_told_once_and_with_its_period(tmp_path):
    """Rank 0 works 40 ms longer in every fourth step, for which rank 1 waits: 10 ms of a step."""

    def make(rank, step, noise):
        late_ms = 40.0 if step % 4 == 0 else 0.0
        return waited(late_ms * noise.gauss(1, 0.01), rank, step, noise, late_rank=0)

    folder = run_of(tmp_path, make, steps=48)
    for rank in (0, 1):
        own = ("augment", "rest", "runs", 40.0, 4)
        waits = ("model", "communication", "sleeps", 40.0, 4)
        write_stacks(folder, rank, COMMON, own if rank == 0 else waits, steps=48)
    (cause,) = causes(judge(load_run(folder, "run")))
    assert cause.subject == "waiting for rank 0, which is in augment(), straggler.py:5, every fourth step"
    assert cause.ms == pytest.approx(10.0, rel=0.1)


def test_data_loading_is_named_with_the_line_that_loads(tmp_path):
    folder = run_of(tmp_path, slow_loader)
    for rank in (0, 1):
        write_stacks(folder, rank, COMMON, ("getitem", "data", "runs", 9.0))
    assert first_cause(folder).line.text == "Rows.__getitem__(), data.py:7"


@pytest.mark.parametrize(
    "samples",
    [
        pytest.param([COMMON], id="sampled-elsewhere"),
        pytest.param([COMMON, ("getitem", "data", "runs", 0.4)], id="too-little-of-it"),
        pytest.param([], id="none"),
    ],
)
def test_a_line_that_the_samples_do_not_show_is_not_named(tmp_path, samples):
    folder = run_of(tmp_path, slow_loader)
    for rank in (0, 1):
        write_stacks(folder, rank, *samples)
    assert first_cause(folder).line is None


def test_a_run_without_a_loss_names_no_line(tmp_path):
    folder = run_of(tmp_path, lambda rank, step, noise: plain(noise))
    for rank in (0, 1):
        write_stacks(folder, rank, COMMON)
    assert causes(judge(load_run(folder, "run"))) == []


def test_a_line_that_collects_garbage_is_named_for_that(tmp_path):
    """No frame shows a collection, but the spans of the host do: 20 ms of 52."""

    def make(rank, step, noise):
        return Host().work(30.0 * noise.gauss(1, 0.01)).work(20.0, "garbage_collection").comm(2.0)

    folder = run_of(tmp_path, make)
    for rank in (0, 1):
        write_stacks(folder, rank, COMMON, ("augment", "rest", "runs", 20.0))
    cause = first_cause(folder)
    assert (cause.kind, cause.line.text) == ("garbage_collection", "augment(), straggler.py:5")
    assert cause.ms == pytest.approx(20.0, rel=0.05)


@pytest.mark.parametrize(
    ("every", "ms", "where"),
    [
        pytest.param(1, 20.0, "gc.collect in straggler.py:5", id="by-a-helper-that-asks-for-it"),
        pytest.param(4, 200.0, "", id="by-itself-in-every-fourth-step"),
    ],
)
def test_collections_are_not_named_again_as_the_programs_code(tmp_path, every, ms, where):
    def make(rank, step, noise):
        host = Host().work(30.0 * noise.gauss(1, 0.01))
        if step % every == 0:
            host.work(ms, "garbage_collection", where)
        return host.comm(2.0)

    folder = run_of(tmp_path, make)
    for rank in (0, 1):
        write_stacks(folder, rank, COMMON, ("augment", "rest", "runs", ms, every))
    assert [cause.kind for cause in causes(judge(load_run(folder, "run")))] == ["garbage_collection"]


def test_slow_steps_in_no_line_are_not_told(tmp_path):
    """Of 40 ms that every fifth step is longer by, stacks show the backward pass alone."""

    def make(rank, step, noise):
        return Host().work(30.0 * noise.gauss(1, 0.01) + 40.0 * (step % 5 == 0)).comm(2.0)

    folder = run_of(tmp_path, make)
    assert [cause.kind for cause in causes(judge(load_run(folder, "run")))] == ["pause"]
    for rank in (0, 1):
        write_stacks(folder, rank, COMMON)
    assert causes(judge(load_run(folder, "run"))) == []


@pytest.mark.parametrize(("every", "kinds"), [(1, ["pause"]), (5, [])])
def test_slow_steps_are_in_no_line_that_is_seen_in_all_samples_of_few_steps(tmp_path, every, kinds):
    """Samples come of the slow steps alone, also of passes, which all steps have."""

    def make(rank, step, noise):
        return Host().work(30.0 * noise.gauss(1, 0.01) + 40.0 * (step % 5 == 0)).comm(2.0)

    folder = run_of(tmp_path, make)
    for rank in (0, 1):
        write_stacks(folder, rank, (*COMMON, every), ("augment", "rest", "runs", 40.0, 5))
    assert [cause.kind for cause in causes(judge(load_run(folder, "run")))] == kinds


def test_slow_steps_are_not_in_the_line_that_calls_backward(tmp_path):
    """Of 40 ms that every fifth step is longer by, stacks show more in the backward pass than elsewhere."""

    def make(rank, step, noise):
        return Host().work(30.0 * noise.gauss(1, 0.01) + 40.0 * (step % 5 == 0)).comm(2.0)

    folder = run_of(tmp_path, make)
    for rank in (0, 1):
        slow = ("backward", "backward", "runs", 22.0, 5), ("augment", "rest", "runs", 18.0, 5)
        write_stacks(folder, rank, COMMON, *slow)
    cause = first_cause(folder)
    assert (cause.kind, cause.line.text) == ("pause", "augment(), straggler.py:5")


@pytest.mark.parametrize(
    ("every", "frame", "phase", "kinds"),
    [
        pytest.param(2, "augment", "forward", [], id="a-policy-gathers-for-two-steps"),
        pytest.param(2, "augment", "rest", ["program_code"], id="an-environment-for-two-steps"),
        pytest.param(10, "augment", "forward", [], id="a-policy-gathers-for-ten-steps"),
        pytest.param(10, "augment", "rest", ["pause"], id="statistics-in-every-tenth-step"),
        pytest.param(10, "evaluates", "forward", ["pause"], id="an-evaluation-by-its-name"),
    ],
)
def test_an_update_of_several_steps_that_begins_with_calls_of_the_model_is_no_loss(
    tmp_path, every, frame, phase, kinds
):
    def make(rank, step, noise):
        return Host().work(30.0 * noise.gauss(1, 0.01) + 10.0 * every * (step % every == 0)).comm(2.0)

    folder = run_of(tmp_path, make, steps=44)
    for rank in (0, 1):
        write_stacks(folder, rank, COMMON, (frame, phase, "runs", 10.0 * every, every))
    found = found_causes(judge(load_run(folder, "run"), 1))
    assert [cause.kind for cause in found.listed] == kinds
    assert ["data for an update of several optimizer steps" in text for text in found.no_loss] == [True] * (
        not kinds
    )


def test_what_the_program_does_in_every_step_beside_its_model_is_named(tmp_path):
    folder = run_of(tmp_path, lambda rank, step, noise: plain(noise))
    for rank in (0, 1):
        write_stacks(folder, rank, COMMON, ("augment", "rest", "runs", 6.0), ("main", "rest", "runs", 3.0))
    cause = first_cause(folder)
    assert (cause.kind, cause.line.text) == ("program_code", "augment(), straggler.py:5")
    assert cause.ms == pytest.approx(32.0 * 6 / 39, rel=0.05)
    assert cause.change.startswith("do what augment(), straggler.py:5 does once, before training")


@pytest.mark.parametrize(
    ("of_samples", "ms"),
    [
        ({"rest": 10}, 4.0 + 1.0 + 2.0),
        ({"rest": 9, "data": 5}, 4.0 + 1.0 + 2.0 + 8.0),
        ({"data": 19, "backward": 1}, 8.0),  # which may be chance
        ({"data": 5, "backward": 5}, math.inf),
    ],
)
def test_no_more_goes_with_samples_than_the_phases_that_they_are_in(monkeypatch, of_samples, ms):
    host_ms = {"data": 8.0, "forward": 4.0, "backward": 16.0, "logging": 1.0, "rest": 2.0}
    rows = [SimpleNamespace(phase=phase, ms=of_phase) for phase, of_phase in host_ms.items()]
    monkeypatch.setattr(program_code, "phases_of", lambda judged: rows)
    phases = np.array([phase for phase, num in of_samples.items() for _ in range(num)])
    samples = SimpleNamespace(in_phase=lambda name: phases == name)
    seen = SimpleNamespace(of=[(samples, [*range(len(phases))])], num=len(phases))
    assert program_code.phases_around_ms(None, seen) == ms


@pytest.mark.parametrize("phase", ["forward", "data"])
def test_the_line_that_calls_a_library_s_loop_is_no_code_of_the_program(tmp_path, phase):
    """Trainer.train() runs both passes in one line of the program."""
    folder = run_of(tmp_path, lambda rank, step, noise: plain(noise))
    for rank in (0, 1):
        write_stacks(folder, rank, COMMON, ("loads", phase, "runs", 4.0), ("loads", "rest", "runs", 16.0))
    assert [cause.kind for cause in causes(judge(load_run(folder, "run")))] == (
        [] if phase == "forward" else ["program_code"]
    )


def test_what_a_library_s_loop_calls_of_the_program_is_named(tmp_path):
    """Lightning's own samples in the line of fit() are no reason to take training_step() for that line."""
    folder = run_of(tmp_path, lambda rank, step, noise: plain(noise))
    for rank in (0, 1):
        in_line = ("loads", "forward", "runs", 4.0), ("loads", "rest", "runs", 6.0)
        write_stacks(folder, rank, COMMON, *in_line, ("training", "rest", "runs", 8.0))
    cause = first_cause(folder)
    assert (cause.kind, cause.line.text) == ("program_code", "Net.training_step(), train.py:80")
    assert cause.ms == pytest.approx(32.0 * 8 / 48, rel=0.05)


@pytest.mark.parametrize(("leaf", "is_told"), [("update", True), ("mean", False)])
def test_a_metric_is_no_model_though_it_is_called_as_a_module(tmp_path, leaf, is_told):
    folder = run_of(tmp_path, lambda rank, step, noise: plain(noise))
    for rank in (0, 1):
        write_stacks(folder, rank, ("backward", "backward", "runs", 24.0), (leaf, "forward", "runs", 8.0))
    found = causes(judge(load_run(folder, "run")))
    assert [cause.line.text for cause in found] == ["augment(), straggler.py:5"] * is_told
    assert all(cause.change.startswith("compute metrics in one step of N") for cause in found)


def test_lines_that_make_the_tensors_of_one_batch_are_one_loss(tmp_path):
    folder = run_of(tmp_path, lambda rank, step, noise: plain(noise))
    for rank in (0, 1):
        both = ("of_draws_one", "rest", "runs", 5.0), ("of_adds_one", "rest", "runs", 3.0)
        write_stacks(folder, rank, ("backward", "backward", "runs", 24.0), *both)
    (cause,) = causes(judge(load_run(folder, "run")))
    assert (cause.kind, cause.line.text, cause.ms) == (
        "program_code",
        "main(), train.py:16",
        pytest.approx(8.0, 0.05),
    )


LOOP = """
    for one in rows[step]:
        while one in seen:
            one = draw(one)
        {}
    x = np.stack(kept)
"""


@pytest.mark.parametrize(
    ("text", "ms"),
    [
        pytest.param("kept.append(one)", 6.0, id="in-a-loop-of-the-step"),
        pytest.param("loss(one).backward()", 4.0, id="but-those-beside-a-pass"),
        pytest.param("", None, id="without-its-source"),
    ],
)
def test_lines_of_a_loop_of_python_are_one_loss(tmp_path, monkeypatch, text, ms):
    """Each takes 2 of 36 ms; of the last one samples come late, behind the loop."""
    folder = run_of(tmp_path, lambda rank, step, noise: plain(noise))
    lines = ("draws_one", "adds_one", "of_stacks_all")
    for rank in (0, 1):
        passes = ("backward", "backward", "runs", 20.0), ("model", "forward", "runs", 10.0)
        write_stacks(folder, rank, *passes, *((line, "rest", "runs", 2.0) for line in lines))
    tree = ast.parse("\n" * 12 + "while True:" + LOOP.format(text)) if text else None
    monkeypatch.setattr(program_code, "source_of", lambda file, record: tree and Source(tree, b""))
    found = causes(judge(load_run(folder, "run")))
    told = [(cause.line.line, cause.ms) for cause in found]
    assert told == ([] if ms is None else [(16, pytest.approx(32.0 * ms / 36, rel=0.05))])


@pytest.mark.parametrize(
    ("before", "line", "is_told"),
    [
        ("for one in rows:", "kept.append(draw(one))", True),
        ("for one in model.parameters():", "kept.append(draw(one))", False),
        ("if rows:", "kept.append(draw(rows))", False),
    ],
)
def test_a_loop_of_python_is_a_loss_from_half_a_tenth_of_a_step(tmp_path, monkeypatch, before, line, is_told):
    folder = run_of(tmp_path, lambda rank, step, noise: plain(noise))
    for rank in (0, 1):
        write_stacks(folder, rank, COMMON, ("augment", "rest", "runs", 2.5))
    tree = ast.parse(f"def augment(rows):\n    kept = []\n\n    {before}\n        {line}")
    monkeypatch.setattr(program_code, "source_of", lambda file, record: Source(tree, b""))
    found = causes(judge(load_run(folder, "run")))
    assert [(one.line.text, one.ms) for one in found] == [
        ("augment(), straggler.py:5", pytest.approx(32.0 * 2.5 / 32.5, rel=0.05))
    ] * is_told


@pytest.mark.parametrize(
    ("made", "ms"),
    [
        pytest.param("of_adds_one", 5.0, id="tensors-in-a-line-behind"),
        pytest.param("of_stacks_all", None, id="arrays"),
        pytest.param("of_later", None, id="behind-the-model"),
    ],
)
def test_a_function_is_one_with_the_lines_that_make_tensors_of_what_it_gives(tmp_path, made, ms):
    """A tenth of the step is neither: samples of the function come late."""
    folder = run_of(tmp_path, lambda rank, step, noise: plain(noise))
    for rank in (0, 1):
        passes = ("backward", "backward", "runs", 20.0), ("model", "forward", "runs", 7.0)
        write_stacks(folder, rank, *passes, ("prepares", "rest", "runs", 2.5), (made, "rest", "runs", 2.5))
    found = causes(judge(load_run(folder, "run")))
    assert [cause.ms for cause in found] == ([] if ms is None else [pytest.approx(ms, rel=0.05)])
    assert all(cause.change.startswith("let prepare(), straggler.py run in a data set") for cause in found)


@pytest.mark.parametrize(
    ("leaf", "ms"),
    [
        pytest.param("tensor", 32.0 * 4 / 32, id="a-tensor-of-python-s-values"),
        pytest.param("mean", None, id="an-operator-which-may-be-the-loss"),
        pytest.param("main", None, id="a-sign-which-may-be-one"),
    ],
)
def test_a_line_of_the_loop_is_one_with_what_it_makes_tensors_of(tmp_path, leaf, ms):
    """Samples that wait for Python's lock while it works come where it lets go: 3 of 4 ms are in the line."""
    folder = run_of(tmp_path, lambda rank, step, noise: plain(noise))
    passes = ("backward", "backward", "runs", 28.0)
    for rank in (0, 1):
        write_stacks(folder, rank, passes, (leaf, "rest", "runs", 3.0), ("augment", "rest", "runs", 1.0))
    found = causes(judge(load_run(folder, "run")))
    assert [cause.ms for cause in found] == ([] if ms is None else [pytest.approx(ms, rel=0.05)])
    for cause in found:
        assert (cause.kind, cause.line.text) == ("program_code", "main(), train.py:20")
        assert cause.change.startswith("let augment(), straggler.py run in a data set")


def test_a_model_that_is_called_by_its_forward_is_not_beside_the_model(tmp_path):
    folder = run_of(tmp_path, lambda rank, step, noise: plain(noise))
    for rank in (0, 1):
        write_stacks(folder, rank, COMMON, ("model", "rest", "runs", 8.0))
    assert causes(judge(load_run(folder, "run"))) == []


@pytest.mark.parametrize(
    ("num", "equal"),
    [pytest.param(1, 2 * 51.2, id="in each step"), pytest.param(8, 2 * 30.1, id="in one step of eight")],
)
def test_samples_that_show_own_code_are_uncertain_as_a_part_of_so_many_equal_ones_is(tmp_path, num, equal):
    """A quarter of 32 steps, wherever samples lie; (the sum)^2 / the sum of squares of each rank's 32 with
    30 ms and others with 10 or 80 ms is 51.2 or 30.1. Mending may save half, besides."""
    folder = run_of(tmp_path, lambda rank, step, noise: plain(noise), steps=33)
    for rank in (0, 1):
        write_stacks(folder, rank, COMMON, ("augment", "rest", "runs", 10.0 * num, num), steps=33)
    (cause,) = causes(judge(load_run(folder, "run"), 1))
    error = 1.96 * (0.75 / 0.25 / equal) ** 0.5
    assert (cause.kind, cause.ms) == ("program_code", pytest.approx(8.0, rel=0.02))
    assert np.log(cause.ms / cause.interval_ms[0]) == pytest.approx(np.hypot(error, 0.65), rel=0.02)


@pytest.mark.parametrize(
    ("line", "op", "size", "is_dealt"),
    [
        (20, "broadcast", 8 << 20, True), (20, "broadcast", 8 << 10, False),
        (21, "broadcast", 8 << 20, False),
        (20, "all_reduce", 8 << 20, False),
    ],
)  # fmt: skip
def test_batches_that_a_rank_hands_out_are_named_where_they_are_sent(tmp_path, line, op, size, is_dealt):
    folder = run_of(tmp_path, lambda rank, step, noise: plain(noise))
    for rank in (0, 1):
        write_stacks(folder, rank, COMMON, ("loads", "rest", "runs", 16.0))
    write_sites(folder, (line, op, "a tensor", 2, size))
    change = first_cause(folder).change
    assert change.startswith("let each rank load its own part of a batch") == is_dealt
    assert ("hands 8.0 MiB a step to the others" in change) == is_dealt


def test_as_many_bytes_as_the_model_s_are_weights_and_no_batch(tmp_path):
    for name, num_bytes, is_dealt in (("teacher", (8 << 20) + 48, False), ("other", 9 << 20, True)):
        run = run_record(2, program={"optimizers": [{"parameter_bytes": num_bytes}]})
        folder = run_of(tmp_path / name, lambda rank, step, noise: plain(noise), run)
        for rank in (0, 1):
            write_stacks(folder, rank, COMMON, ("loads", "rest", "runs", 16.0))
        write_sites(folder, (20, "broadcast", "a tensor", 2, 8 << 20))
        change = first_cause(folder).change
        assert change.startswith("let each rank load its own part of a batch") == is_dealt


@pytest.mark.parametrize(("leaf", "is_offered"), [("synchronize", True), ("loads", False)])
def test_operators_on_many_tensors_are_offered_where_stacks_show_torch_alone(tmp_path, leaf, is_offered):
    folder = run_of(tmp_path, lambda rank, step, noise: plain(noise))
    for rank in (0, 1):
        write_stacks(folder, rank, COMMON, (leaf, "rest", "runs", 16.0))
    cause = first_cause(folder)
    assert (cause.kind, cause.line.text) == ("program_code", "main(), train.py:20")
    assert ("torch._foreach_*" in cause.change) == is_offered


def test_what_others_take_of_the_cores_is_neither_the_programs_code_nor_its_sleep(tmp_path):
    """Of 40 ms the thread runs for 15, waits for a core for 15 and sleeps for 10, all in one line."""
    folder = run_of(tmp_path, sleeps_while_others_have_the_cores)
    for rank in (0, 1):
        own = [("augment", "rest", doing, ms) for doing, ms in (("ready", 15.0), ("sleeps", 10.0))]
        write_stacks(folder, rank, ("backward", "backward", "runs", 15.0), *own)
    found = causes(judge(load_run(folder, "run")))
    assert [(cause.kind, round(cause.ms)) for cause in found] == [("core_taken", 15), ("pause", 10)]


def test_anomaly_detection_is_one_cause_at_the_line_that_turns_it_on(tmp_path):
    """6 ms of samples that keep stacks in the model's forward pass, and of the other 26 nobody knows."""
    modes = {"anomaly_detection": True, "anomaly_at": (TRAIN, 8)}
    run = msgspec.structs.replace(run_record(2), program={"modes": modes})
    folder = run_of(tmp_path, lambda rank, step, noise: plain(noise), run)
    for rank in (0, 1):
        kept = ("checkcache", "forward", "runs", 6.0)
        write_stacks(
            folder, rank, kept, ("backward", "backward", "runs", 20.0), ("main", "forward", "runs", 6.0)
        )
    (cause,) = causes(judge(load_run(folder, "run")))
    assert cause.subject == "autograd's anomaly detection on all ranks in train.py:8"
    assert cause.ms == pytest.approx(6.0, rel=0.05)
    assert cause.evidence[0].startswith("6.00 ms of a ")  # of which the interval holds less, too
    assert "outside of model" not in " ".join(cause.evidence)


@pytest.mark.parametrize("is_sampled", [True, False])
def test_what_slows_all_of_a_step_is_first_and_without_a_size(tmp_path, is_sampled):
    program = {"modes": {"slowed_by": {"profile": (TRAIN, 8)}}}
    run = msgspec.structs.replace(run_record(2), program=program)
    folder = run_of(tmp_path, lambda rank, step, noise: plain(noise), run)
    for rank in (0, 1) if is_sampled else ():
        write_stacks(folder, rank, COMMON, ("augment", "rest", "runs", 6.0))
    found = causes(judge(load_run(folder, "run")))
    assert [cause.kind for cause in found] == ["program_code"] * (1 + is_sampled)
    assert found[0].headline.startswith(
        "a profiler of Python's calls on all ranks in train.py:8: in all steps, "
    )
    assert found[0].change.endswith("at each call and each return: at train.py:8")


@pytest.mark.parametrize(
    ("calls_per_s", "call_ns", "ms"),
    [
        # 3 times 100 ns of 400,000 calls a second, or 60,000: 12 % of a step, and 2.
        pytest.param(400_000, 100.0, 0.12, id="many-calls"),
        pytest.param(60_000, 100.0, None, id="few-calls"),
        pytest.param(0, 100.0, 0.0, id="none-counted"),
        pytest.param(400_000, None, 0.0, id="no-cost-of-one"),
    ],
)
def test_a_profiler_costs_what_the_calls_that_it_sees_do(tmp_path, calls_per_s, call_ns, ms):
    modes = {"slowed_by": {"profile": (TRAIN, 8)}, "profiled_calls_per_s": calls_per_s}
    run = msgspec.structs.replace(run_record(2), program={"modes": modes | {"profiled_call_ns": call_ns}})
    judged = judge(load_run(run_of(tmp_path, lambda rank, step, noise: plain(noise), run), "run"))
    found = [cause for cause in causes(judged) if cause.kind == "program_code"]
    if ms is None:
        assert found == []
        return
    [cause] = found
    step_ms = account_of(judged).mean_step_ms
    assert cause.ms == pytest.approx(ms * step_ms, rel=0.01)
    assert (cause.interval_ms is None) == (ms == 0)
    if ms:
        low, high = (edge / cause.ms for edge in cause.interval_ms)
        assert low <= 0.5 < 2.0 <= high < 2.5
        assert f"it sees {400 * step_ms:,.0f} calls in a step" in " ".join(cause.evidence).replace(".0 ", " ")


def test_on_a_device_a_tracer_costs_no_more_than_the_device_waits(tmp_path):
    run = msgspec.structs.replace(
        run_record(2, devices=GPU_RUN.devices), program={"modes": {"slowed_by": {"tracer": (TRAIN, 8)}}}
    )

    def make(rank, step, noise):
        return Host().work(20.0).idle(10.0).comm(2.0), {"source": "kernels"}

    first = causes(judge(load_run(run_of(tmp_path, make, run), "run")))[0]
    assert ": in all steps, at most 10.0 ms, in which the device waits, and no sample" in first.headline


def test_setting_gradients_back_is_no_code_of_the_program(tmp_path):
    folder = run_of(tmp_path, lambda rank, step, noise: plain(noise))
    for rank in (0, 1):
        write_stacks(folder, rank, COMMON, ("zero_grad", "rest", "runs", 6.0))
    assert causes(judge(load_run(folder, "run"))) == []


def test_compiling_in_each_step_is_a_cause_of_its_line(tmp_path):
    folder = run_of(tmp_path, lambda rank, step, noise: plain(noise))
    for rank in (0, 1):
        write_stacks(folder, rank, COMMON, ("compiles", "rest", "runs", 6.0))
    (cause,) = causes(judge(load_run(folder, "run")))
    assert cause.subject == "torch.compile, which compiles anew on all ranks in main(), train.py:20"
    assert cause.ms == pytest.approx(6.0, rel=0.2)
    assert cause.change.startswith("mark what varies")


def fell_back(tmp_path, make, *samples):
    at = {"file": TRAIN, "line": 95, "function": "Net.forward"}
    program = {"modes": {"fallen_back": [{**at, "times": 8, "varies": "self.seen"}]}}
    folder = run_of(tmp_path, make, msgspec.structs.replace(run_record(2), program=program))
    for rank in (0, 1) if samples else ():
        write_stacks(folder, rank, *samples)
    return causes(judge(load_run(folder, "run")))


@pytest.mark.parametrize(
    ("samples", "is_told"),
    [
        pytest.param((COMMON, ("of_timed", "forward", "runs", 6.0)), True, id="seen"),
        pytest.param((COMMON,), False, id="not seen"),
        pytest.param((), True, id="nothing sampled"),
    ],
)
def test_compiled_code_that_fell_back_is_told_without_a_size_where_no_kernels_are(tmp_path, samples, is_told):
    found = fell_back(tmp_path, lambda rank, step, noise: plain(noise), *samples)
    told = [cause for cause in found if cause.subject.startswith("compiled code that fell back to eager")]
    assert len(told) == is_told
    for cause in told:
        assert cause.headline.endswith(
            "in Net.forward(), train.py:95: no step shows what it takes when it is compiled"
        )
        assert "compiled it 8 times, which is the limit" in cause.evidence[0]
        assert "as self.seen differed from call to call" in cause.evidence[0]
        assert "register_buffer" in cause.change


@pytest.mark.parametrize(("elementwise_ms", "told_ms"), [(6.0, [8.0]), (0.5, [])])
def test_of_a_device_it_costs_at_most_what_compiling_makes_less_of(tmp_path, elementwise_ms, told_ms):
    """A tenth of 32 ms and more; products are none of it."""
    classes = {"elementwise": (elementwise_ms, 40), "copy": (2.0, 40), "gemm": (20.0, 40)}
    seen = {"source": "kernels", "kernels": KernelSums(num_kernels=120, classes=classes)}
    found = fell_back(tmp_path, lambda rank, step, noise: (plain(noise), seen))
    found = [cause for cause in found if cause.kind == "program_code"]
    assert [cause.ms for cause in found] == [pytest.approx(ms, rel=0.01) for ms in told_ms]
    assert all("train.py:95: at most 8.00 ms a step" in cause.headline for cause in found)


@pytest.mark.parametrize(
    ("operators", "ms", "most_ms"),
    [
        pytest.param(1000, 6 + (6 + 20) / 2, 33.0, id="many-operators"),
        pytest.param(100, 13.0, 20.0, id="as-they-cost-at-most"),
        pytest.param(20, 6.0, 33.0, id="few-as-of-convolutions"),
        pytest.param(None, 6.0, 33.0, id="not-counted"),
    ],
)
def test_half_of_what_no_sample_shows_of_anomaly_detection_is_told(tmp_path, operators, ms, most_ms):
    """On a CPU: 6 of 12 ms of the forward pass keep stacks, as samples show; the backward pass takes 20."""
    numbers = dict.fromkeys(("flops", "bytes", "forward_flops", "forward_bytes", "handed_bytes"), 0.0)
    lines = [LineOfWork(at=StackFrame(TRAIN, 5, "forward", True), operators=operators or 1, **numbers)]
    work = None if operators is None else WorkOfStep(flops=1.0, lines=lines)
    run = run_record(2, work=work, program={"modes": {"anomaly_detection": True}})

    def make(rank, step, noise):
        return Host().work(12.0 * noise.gauss(1, 0.001)).work(20.0, "backward").comm(1.0)

    folder = run_of(tmp_path, make, run)
    for rank in (0, 1):
        kept = ("checkcache", "forward", "runs", 6.0)
        of_model = ("main", "forward", "runs", 7.0)
        write_stacks(folder, rank, kept, of_model, ("backward", "backward", "runs", 20.0))
    cause, *_ = (one for one in causes(judge(load_run(folder, "run"))) if one.subject.startswith("autograd"))
    assert cause.ms == pytest.approx(ms, rel=0.02)
    assert cause.interval_ms[1] <= most_ms
    assert any("of the rest of both passes" in text for text in cause.evidence) == (ms > 6.0)


def test_anomaly_detection_without_a_sample_in_it_is_no_cause(tmp_path):
    run = msgspec.structs.replace(run_record(2), program={"modes": {"anomaly_detection": True}})
    folder = run_of(tmp_path, lambda rank, step, noise: plain(noise), run)
    for rank in (0, 1):
        write_stacks(folder, rank, COMMON)
    assert causes(judge(load_run(folder, "run"))) == []


def test_work_of_one_rank_alone_is_not_that_of_all(tmp_path):
    folder = run_of(tmp_path, lambda rank, step, noise: plain(noise))
    write_stacks(folder, 0, COMMON, ("augment", "rest", "runs", 6.0))
    write_stacks(folder, 1, COMMON)
    assert causes(judge(load_run(folder, "run"))) == []


@pytest.mark.parametrize(
    ("backward_every", "augment_every", "ms"),
    [
        pytest.param(1, (5, 10), 32.0 * 6 / 52, id="four-of-27-samples-and-two-of-25"),
        pytest.param(1, (5, 20), None, id="four-of-27-and-one-of-24"),
        pytest.param(2, (10, 20), None, id="three-of-25-in-all"),
    ],
)
def test_a_rank_with_fewer_samples_by_chance_has_as_much_of_it(tmp_path, backward_every, augment_every, ms):
    """Few samples that show a tenth of the step on a mean rank: with three, it may be half as much."""
    folder = run_of(tmp_path, lambda rank, step, noise: plain(noise))
    for rank in (0, 1):
        passes = ("backward", "backward", "runs", 30.0, backward_every)
        write_stacks(folder, rank, passes, ("augment", "rest", "runs", 30.0, augment_every[rank]))
    found = [(cause.kind, cause.ms) for cause in causes(judge(load_run(folder, "run"), 1))]
    assert found == ([] if ms is None else [("program_code", pytest.approx(ms, rel=0.03))])


@pytest.mark.parametrize(
    ("line", "moves", "sampled", "remedy"),
    [
        (33, "gradients", ("getitem", "communication"), "stack the values into one tensor"),
        (20, "a tensor", ("getitem", "forward"), "stack the values into one tensor and call all_reduce once"),
        (20, "a tensor", ("norm", "forward"), "SyncBatchNorm gathers the statistics of each layer in turn"),
    ],
)
def test_small_messages_are_named_with_the_line_that_issues_them(tmp_path, line, moves, sampled, remedy):
    """Samples show another line, of broadcasts; on a device there would be none."""

    folder = run_of(tmp_path, many_small)
    for rank in (0, 1):
        write_stacks(folder, rank, (*sampled, "runs", 18.0))
        site = CallSite(
            file=TRAIN,
            line=line,
            function="main",
            op="all_reduce",
            moves=moves,
            num_calls=48,
            bytes=1 << 20,
        )
        (folder / sites_name(rank)).write_bytes(msgspec.json.encode(CallSites(num_steps=4, sites=[site])))
    cause = next(cause for cause in causes(judge(load_run(folder, "run"))) if cause.kind == "small_messages")
    assert cause.line.text == f"main(), train.py:{line}"
    assert f"all_reduce is issued in main(), train.py:{line} ({moves}, 12 times a step)" in cause.evidence
    assert cause.change.startswith(remedy)


def sleeps_while_others_have_the_cores(rank, step, noise):
    host = Host().work(40.0 * noise.gauss(1, 0.01)).comm(2.0)
    return host, {"host_use": HostUse(15.0, 15.0)}


@pytest.mark.parametrize(
    ("phase", "taken_ms", "kinds"),
    [
        # Half of the thread's time on its way went to others, and so did half of the 10 ms that it slept.
        pytest.param("forward", 15.0 + 5.0, ["core_taken"], id="for-threads-of-torch"),
        pytest.param("rest", 15.0, ["core_taken", "pause"], id="of-its-own"),
    ],
)
def test_a_thread_that_sleeps_in_torch_lacks_the_cores_of_its_threads(tmp_path, phase, taken_ms, kinds):
    folder = run_of(tmp_path, sleeps_while_others_have_the_cores)
    for rank in (0, 1):
        write_stacks(folder, rank, ("backward", phase, "sleeps", 12.0), COMMON)
    found = [
        cause for cause in causes(judge(load_run(folder, "run"))) if cause.kind in ("core_taken", "pause")
    ]
    assert [cause.kind for cause in found] == kinds
    assert found[0].ms == pytest.approx(taken_ms, rel=0.06)


def reads_each_norm(rank, step, noise):
    """Eight reads of a value, each with a wait and then idle launches."""
    host = Host()
    for _ in range(8):
        host.host.append(HostSpan("synchronisation", host.at, host.at + 0.5, "item in straggler.py:5"))
        host.work(0.5).idle(1.0 * noise.gauss(1, 0.01))
    return host.work(20.0).comm(2.0), {"source": "kernels", "host_use": HostUse(30.0, 0.0)}


def test_a_line_that_reads_value_after_value_waits_for_the_device(tmp_path):
    """What is sampled there is launching, and its reason is the waits that were noted in the same line."""
    folder = run_of(tmp_path, reads_each_norm)
    for rank in (0, 1):
        write_stacks(folder, rank, COMMON, ("augment", "rest", "runs", 12.0))
    first = first_cause(folder)
    assert first.kind == "synchronisation"
    assert first.line.text == "augment(), straggler.py:5"
    assert first.ms == pytest.approx(8.0, rel=0.1)


def waits_in(call):
    """Queued work of 10 ms is waited for in this call of main, and the device idles for 6 ms behind it."""

    def make(rank, step, noise):
        host = Host().work(20.0 * noise.gauss(1, 0.01))
        host.host.append(HostSpan("synchronisation", host.at - 10.0, host.at, f"{call} in train.py:20"))
        return host.idle(6.0).work(10.0).comm(2.0), {"source": "kernels", "host_use": HostUse(30.0, 0.0)}

    return make


def test_a_wait_for_the_whole_device_is_to_be_left_out(tmp_path):
    """Its evidence is no value that is read, and events time a phase without it."""
    folder = run_of(tmp_path, waits_in("synchronize"))
    for rank in (0, 1):  # within the model, whose other samples launch
        write_stacks(
            folder, rank, ("synchronize", "forward", "runs", 12.0), ("getitem", "forward", "runs", 9.0)
        )
    first = first_cause(folder)
    assert first.kind == "synchronisation"
    assert first.change.startswith("leave the synchronize() of main(), train.py:20 out of the loop")


def test_the_line_of_one_wait_is_not_named_for_what_the_host_does_behind_it(tmp_path):
    """loss.item() in main; the device idles while augment runs."""
    folder = run_of(tmp_path, waits_in("item"))
    for rank in (0, 1):
        write_stacks(folder, rank, COMMON, ("main", "rest", "runs", 10.0), ("augment", "rest", "runs", 6.0))
    assert first_cause(folder).line.text == "augment(), straggler.py:5"


def reads(num, call, place):
    """It is waited for 0.5 ms num times a step in this call, and once for 0.1 ms in another line."""

    def make(rank, step, noise):
        host = Host().work(20.0 * noise.gauss(1, 0.01))
        host.host.append(HostSpan("synchronisation", 9.0, 9.1, "bool in data.py:7"))
        for at in range(num):
            host.host.append(HostSpan("synchronisation", at + 0.0, at + 0.5, f"{call} in {place}"))
        return host.comm(2.0), {"source": "kernels"}

    return make


WAIT = CauseFinding("synchronisation", np.ones(STEPS), {("synchronisation",): 1.0})


def judged_with_stacks(folder, make, *stacks, **run):
    folder = run_of(folder, make, run_record(2, **run))
    for rank in (0, 1):
        write_stacks(folder, rank, COMMON, *stacks)
    return judge(load_run(folder, "run"))


def test_the_line_that_waits_longest_is_the_line_of_a_wait(tmp_path):
    """Though samples are in the line whose launches come behind it."""
    judged = judged_with_stacks(
        tmp_path,
        reads(8, "item", "train.py:20"),
        ("main", "rest", "runs", 2.0),
        ("augment", "rest", "runs", 8.0),
    )
    calls = waiting_calls(WAIT, judged)
    assert [(one.at.text, one.call) for one in calls] == [
        ("main(), train.py:20", "item"),
        ("Rows.__getitem__(), data.py:7", "bool"),
    ]
    assert [(one.num, one.ms) for one in calls] == [pytest.approx((8.0, 4.0)), pytest.approx((1.0, 0.1))]
    assert waits_text(calls) == (
        "the host waits for the device, brief waits not counted: item in main(), train.py:20 (8 times a"
        " step, 4.00 ms), bool in Rows.__getitem__(), data.py:7 (once a step, 0.100 ms)"
    )
    line = waiting_line(calls)
    assert (line.text, line.calls, line.num_samples) == ("main(), train.py:20", "item of torch", 0)


@pytest.mark.parametrize(
    ("num", "place", "stack", "at", "call"),
    [
        pytest.param(
            8, "trainer.py:1847", "epoch", "main(), train.py:20",
            "bool in Trainer._run_epoch of transformers", id="a-library-s",
        ),
        pytest.param(8, "straggler.py:5", "epoch", "augment(), straggler.py:5", "bool", id="the-program-s"),
        pytest.param(
            8, "straggler.py:5", "update", "augment(), straggler.py:5",
            "bool in MeanMetric.update of torchmetrics", id="a-library-s-in-the-program-s-line",
        ),
        pytest.param(
            8, "straggler.py:5", "distribution", "augment(), straggler.py:5",
            "bool in checks of torch.distributions", id="checks-of-a-distribution",
        ),
        pytest.param(8, "straggler.py:5", "draws", "augment(), straggler.py:5", "bool", id="draws"),
        pytest.param(8, "loss.py:9", "augment", "loss.py:9", "bool", id="in-no-library"),
        pytest.param(1, "loss.py:9", "epoch", "loss.py:9", "bool", id="too-short-to-be-seen"),
    ],
)  # fmt: skip
def test_a_wait_in_a_library_is_of_the_line_that_calls_it(tmp_path, num, place, stack, at, call):
    """Of 22 ms a step 0.5 ms for each wait; a step has two samples."""
    judged = judged_with_stacks(tmp_path, reads(num, "bool", place), (stack, "rest", "runs", 4.0))
    waits = waiting_calls(WAIT, judged)
    assert (waits[0].at.text, waits[0].call) == (at, call)
    assert waiting_line(waits).calls == (call if call.startswith("bool in") else f"{call} of torch")


@pytest.mark.parametrize(
    ("sampled", "remedy"),
    [
        ("of_log", "leave sync_dist=True out of LightningModule.log_dict of lightning"),
        ("of_gather", "Accelerator.gather of accelerate calls them"),
        ("of_waiting", "remove the barriers"),
        ("main", "remove the barriers"),
    ],
)
@pytest.mark.parametrize(("num", "kind", "lines"), [(12, "small_messages", [20]), (4, "transfer", [20, 21])])
def test_barriers_of_a_library_are_not_the_program_s_to_remove(tmp_path, num, kind, lines, sampled, remedy):
    """Samples are in line 20 alone."""

    def with_barriers(rank, step, noise):
        host = Host().work(10.0 * noise.gauss(1, 0.01))
        for _ in range(num):
            host.comm(18.0 / num, "barrier", size=0)
        return host

    folder = run_of(tmp_path, with_barriers)
    write_sites(folder, *((line, "barrier", "nothing", num // len(lines), 0) for line in lines))
    for rank in (0, 1):
        write_stacks(folder, rank, COMMON, (sampled, "communication", "sleeps", 18.0))
    cause = first_cause(folder)
    assert cause.kind == kind
    assert cause.line is None or [cause.line.line] == lines
    assert cause.change.startswith(remedy)
    assert not any(words in text for text in (cause.headline, *cause.evidence) for words in ("merged", "0 B"))


def test_one_sample_of_saving_tells_where_a_checkpoint_is_saved(tmp_path):
    """Rank 0 saves for 60 ms in every tenth of 48 steps, and is sampled there in step 40."""

    def make(rank, step, noise):
        if step % 10:
            return plain(noise)
        host = Host().work(30.0)
        return host.work(60.0, "checkpoint").comm(2.0) if rank == 0 else host.comm(62.0)

    folder = run_of(tmp_path, make, steps=48)
    write_stacks(folder, 0, COMMON, ("getitem", "checkpoint", "runs", 60.0, 40), steps=48)
    write_stacks(folder, 1, COMMON, steps=48)
    cause = first_cause(folder)
    assert (cause.kind, cause.line.text) == ("checkpoint", "Rows.__getitem__(), data.py:7")
    assert cause.line.num_samples == 0


def test_a_bubble_is_told_with_the_line_that_receives(tmp_path):
    def make(rank, step, noise):
        host = Host().work(30.0)
        for _ in range(12):
            host = host.comm(2.0, op="recv", size=65_536)
        return host

    folder = run_of(tmp_path, make)
    write_sites(folder, (20, "recv", "a tensor", 12, 65_536))
    cause = first_cause(folder)
    assert cause.kind == "bubble"
    assert "recv is issued in main(), train.py:20 (a tensor, 12 times a step)" in cause.evidence


LOADER = {"loaders": [{"num_batches": 9, "num_workers": 0}]}


@pytest.mark.parametrize(
    ("make", "run", "is_own"),
    [
        pytest.param(reads(8, "cpu", "train.py:20"), {}, True, id="of-a-simulator"),
        pytest.param(reads(8, "cpu", "train.py:20"), {"program": LOADER}, False, id="of-a-loader"),
        pytest.param(reads(1, "cpu", "train.py:20"), {}, False, id="once"),
        pytest.param(reads(8, "bool", "train.py:20"), {}, False, id="a-branch"),
        pytest.param(reads(8, "cpu", "straggler.py:5"), {}, False, id="in-another-function"),
    ],
)
def test_what_a_function_sends_may_depend_on_what_it_reads(tmp_path, make, run, is_own):
    judged = judged_with_stacks(tmp_path, make, ("tensor", "rest", "runs", 2.0), **run)
    assert sends_own_data(waiting_calls(WAIT, judged), judged) == is_own


def write_sites(folder, *issued):
    """issued: (line, operation, what it moves, calls a step, bytes a step)."""
    sites = [
        CallSite(
            file=TRAIN, line=line, function="main", op=op, moves=moves, num_calls=4 * num, bytes=4 * size
        )
        for line, op, moves, num, size in issued
    ]
    for rank in (0, 1):
        (folder / sites_name(rank)).write_bytes(msgspec.json.encode(CallSites(num_steps=4, sites=sites)))


@pytest.mark.parametrize(("sampled", "ms"), [("hook", 5.0 + 6.0), ("backward", 5.0)])
def test_conversions_are_of_wide_gradients_where_autograd_calls_the_function_that_issues(
    tmp_path, sampled, ms
):
    """10 ms of float32 where parameters have half of it; who calls backward() converts nothing there."""

    def step(rank, step, noise):
        return Host().work(30.0 * noise.gauss(1, 0.01)).comm(10.0, size=20 << 20)

    optimizer = {"parameter_bytes": 9.0, "bytes_of_dtypes": {"bfloat16": 9.0}}
    folder = run_of(tmp_path, step, run_record(2, program={"optimizers": [optimizer]}))
    for rank in (0, 1):
        write_stacks(folder, rank, (sampled, "backward", "runs", 6.0), ("norm", "forward", "runs", 34.0))
    write_sites(folder, (33, "all_reduce", "gradients", 1, 20 << 20))
    found = [cause for cause in causes(judge(load_run(folder, "run"))) if cause.kind == "wide_dtype"]
    assert [cause.ms for cause in found] == [pytest.approx(ms, rel=0.1)]


def test_gradients_of_ddp_beside_more_calls_of_the_program_are_ddps(tmp_path):
    """The bucket is exposed for 20 ms, the six values for 3."""

    def make(rank, step, noise):
        host = Host().work(30.0 * noise.gauss(1, 0.01)).comm(20.0, size=20 << 20, module=0)
        for _ in range(6):
            host.comm(0.5, size=4)
        return host, {"modules": ["bucket 0: 8.weight"]}

    folder = run_of(tmp_path, make)
    write_sites(
        folder,
        (14, "all_reduce", "gradients, bucket 0: 8.weight", 1, 20 << 20),
        (17, "all_reduce", "a value", 6, 24),
    )
    cause = first_cause(folder)
    assert cause.kind == "transfer"
    assert "no_sync()" in cause.change


@pytest.mark.parametrize(
    "issued",
    [
        pytest.param([(33, "all_reduce"), (44, "all_reduce")], id="two-places-issue-it"),
        pytest.param([(20, "all_reduce"), (44, "all_reduce")], id="one-of-two-is-sampled"),
        pytest.param([(33, "all_gather")], id="its-place-was-not-looked-at"),
    ],
)
def test_samples_of_other_operations_are_no_line(tmp_path, issued):
    """All samples in communication are of line 20, in no function of torch."""
    folder = run_of(tmp_path, lambda rank, step, noise: plain(noise, comm=30.0))
    for rank in (0, 1):
        write_stacks(folder, rank, ("main", "communication", "runs", 30.0))
    write_sites(folder, *[(line, op, "a tensor", 1, 1 << 20) for line, op in issued])
    cause = first_cause(folder)
    assert (cause.kind, cause.line) == ("transfer", None)


def test_a_gather_beside_ddp_has_no_remedy_of_its_gradients(tmp_path):
    """Of predictions, in line 20; DDP reduces one bucket."""

    def make(rank, step, noise):
        host = Host().work(30.0 * noise.gauss(1, 0.01)).comm(1.0, size=20 << 20, module=0)
        return host.comm(20.0, "all_gather", size=20 << 20), {"modules": ["bucket 0: 8.weight"]}

    folder = run_of(tmp_path, make)
    for rank in (0, 1):
        write_stacks(folder, rank, ("main", "communication", "runs", 20.0))
    cause = first_cause(folder)
    assert cause.kind == "transfer"
    assert cause.change.endswith("fewer steps that communicate: at main(), train.py:20")


@pytest.mark.parametrize(
    ("name", "doing", "kinds"), [("augment", "sleeps", ["pause"]), ("backward", "runs", [])]
)
def test_a_thread_sleeps_in_a_line_or_is_not_said_to(tmp_path, name, doing, kinds):
    """10 ms that it neither runs nor is ready; samples that show no line of it show torch's other threads."""

    def make(rank, step, noise):
        return Host().work(40.0 * noise.gauss(1, 0.01)).comm(2.0), {"host_use": HostUse(32.0, 0.0)}

    folder = run_of(tmp_path, make)
    for rank in (0, 1):
        write_stacks(folder, rank, COMMON, (name, "rest" if kinds else "backward", doing, 10.0))
    assert [cause.kind for cause in causes(judge(load_run(folder, "run")))] == kinds


@pytest.mark.parametrize("every", [4, 40])
def test_a_group_that_each_step_makes_is_named_with_its_line(tmp_path, every):
    """Its threads end where the function that made it returns; one that is made once is not what sleeps."""

    def make(rank, step, noise):
        return Host().work(40.0 * noise.gauss(1, 0.01)).comm(2.0), {"host_use": HostUse(32.0, 0.0)}

    folder = run_of(tmp_path, make)
    for rank in (0, 1):
        made = ("group", "communication", "sleeps", 1.0, every)
        write_stacks(folder, rank, COMMON, ("augment", "rest", "sleeps", 10.0), made)
    cause, told = first_cause(folder), "process group of shared_error(), train.py:38 once, before training"
    assert cause.line.text == "augment(), straggler.py:5"
    assert (told in cause.change) == (every == 4)
    where = "new_group() of torch.distributed in shared_error(), train.py:38" if every == 4 else "in no call"
    assert where in cause.evidence[0]


@pytest.mark.parametrize(("doing", "kinds"), [("sleeps", ["data_loading"]), ("runs", [])])
def test_more_workers_do_not_shorten_what_taking_a_batch_from_them_takes(tmp_path, doing, kinds):
    run = run_record(2, program={"loaders": [{"num_workers": 2, "num_batches": 99, "num_epochs": 1}]})

    def make(rank, step, noise):
        return Host().work(10.0, "data").work(30.0 * noise.gauss(1, 0.01)).comm(2.0)

    folder = run_of(tmp_path, make, run)
    for rank in (0, 1):
        write_stacks(folder, rank, COMMON, ("augment", "data", doing, 10.0))
    assert [cause.kind for cause in causes(judge(load_run(folder, "run")))] == kinds


@pytest.mark.parametrize(
    ("samples", "told_ms"),
    [
        pytest.param([("rebuilt", "data", "runs", 10.0)], [10.0], id="all"),
        pytest.param([("rebuilt", "data", "runs", 6.0), ("loads", "data", "sleeps", 4.0)], [6.0], id="most"),
        pytest.param([("rebuilt", "data", "runs", 4.0), ("loads", "data", "runs", 6.0)], [], id="least"),
    ],
)
def test_a_batch_that_comes_in_many_pieces_costs_what_taking_them_takes(tmp_path, samples, told_ms):
    """Of 10 ms in which the next batch is fetched."""
    made = {"num_workers": 2, "num_batches": 99, "num_epochs": 1, "site": "train.py:9"}

    def make(rank, step, noise):
        return Host().work(10.0, "data").work(30.0 * noise.gauss(1, 0.01)).comm(2.0)

    folder = run_of(tmp_path, make, run_record(2, program={"loaders": [made]}))
    for rank in (0, 1):
        write_stacks(folder, rank, COMMON, *samples)
    found = causes(judge(load_run(folder, "run")))
    assert [cause.ms for cause in found] == [pytest.approx(ms, rel=0.05) for ms in told_ms]
    for cause in found:
        assert cause.subject == "data loading on all ranks in main(), train.py:20"
        assert cause.change.startswith("put a batch together in the worker: at train.py:9 a collate_fn")


@pytest.mark.parametrize(
    ("name", "is_python"),
    [
        *[(name, True) for name in ("np.sort", "np.dot", "sorted", "x.tolist")],
        *[(name, False) for name in ("torch.cat", "view", "sum", "rows.dot", "self.x.sum")],
    ],
)
def test_what_may_be_a_function_of_torch_is_not_called_python(name, is_python):
    called = StackFrame("", 0, name, is_program=False)
    assert (_python_at([FRAMES["main"], called]) is not None) == is_python


@pytest.mark.parametrize(
    ("library", "others", "told"),
    [
        pytest.param("Trainer.train", StackFrame("torch", 0, "Linear.forward", False), [], id="trainer"),
        pytest.param("parse", StackFrame("parser", 0, "tokens", False), ["main(), train.py:20"], id="parser"),
    ],
)
def test_a_library_that_calls_torch_runs_operators_without_a_frame_and_no_python(library, others, told):
    """A norm that its model makes of operators by their signs has the library's frame as the last."""
    calls = (MAIN, StackFrame("a_library", 0, library, False))
    last = StackFrame("a_library", 0, "Norm.forward", False)
    stacks = sampled(
        *((step, 20_000, "runs", *calls, one) for step in range(2, 12) for one in (last, others))
    )
    stacks.samples = [
        msgspec.structs.replace(one, phase=STACK_PHASES.index("forward")) for one in stacks.samples
    ]
    judged = sampled_dataset([stacks], source="host").first
    assert [one.facts["at"].text for one in code_in_passes(judged, account_of(judged), [])] == told


def in_the_forward_pass(*paths, reason="", doing="runs", **record):
    """What is told of samples of a CPU's forward pass, 20 ms in each of ten steps of each path."""
    stacks = sampled(*((step, 20_000, doing, MAIN, *path) for step in range(2, 12) for path in paths))
    stacks.samples = [
        msgspec.structs.replace(one, phase=STACK_PHASES.index("forward")) for one in stacks.samples
    ]
    record = run_record(1, not_measured={"flops_per_step": reason}, **record)
    judged = msgspec.structs.replace(sampled_dataset([stacks], source="host").first, record=record)
    account = account_of(judged)
    return [
        (one.facts["origin"], one.facts["at"].text, round(one.mean_ms / account.mean_step_ms, 2))
        for one in code_in_passes(judged, account, [])
    ]


@pytest.mark.parametrize(("name", "is_told"), [("torch.tensor", True), ("torch.cat", False)])
def test_a_tensor_of_values_within_the_model_is_python_of_its_line(name, is_told):
    """Lists are made without letting go of the lock: samples come where torch takes them."""
    forward = StackFrame("/job/model.py", 30, "Net.forward", True)
    told = in_the_forward_pass(
        (forward, StackFrame("", 0, name, False)), (forward, of_torch("Conv2d.forward"))
    )
    assert told == ([("in_passes", "Net.forward(), model.py:30", 0.5)] if is_told else [])


@pytest.mark.parametrize(
    ("path", "is_called"),
    [
        ((MAIN, MODEL), True),
        ((MAIN, AUGMENT), False),  # a loop of a simulator, whose rounds call no model
        ((MAIN, ENGINE), False),
    ],
    ids=["forward", "rest", "backward"],
)
def test_rounds_call_a_model_where_samples_of_its_forward_pass_are_in_their_lines(path, is_called):
    judged = sampled_dataset([sampled((2, 20_000, "runs", *path))]).first
    line = CodeLine(file=MAIN.file, line=30, function=MAIN.function, text="main(), train.py:30")
    assert calls_model(line, MAIN.line - 1, MAIN.line + 1, judged) == is_called
    assert not calls_model(line, MAIN.line + 1, MAIN.line + 9, judged)


def of_torch(function):
    return StackFrame("torch", 0, function, False)


@pytest.mark.parametrize(
    ("method", "num", "is_held"),
    [("Lit.on_before_optimizer_step", 4, True), ("Lit.on_after_backward", 2, False), ("Lit.log", 4, False)],
)
def test_an_update_that_a_trainer_calls_hooks_before_holds_these(method, num, is_held):
    hook = StackFrame("/job/lit.py", 9, method, True)
    judged = sampled_dataset(
        [sampled(*((step, 20_000, "runs", MAIN, hook) for step in range(2, 2 + num)))], source="host"
    ).first
    assert holds_hooks(judged) == is_held


@pytest.mark.parametrize(("loader", "is_told"), [("DataLoaderDispatcher", True), ("DataLoaderShard", False)])
def test_one_rank_loads_the_batches_of_all_in_the_line_of_such_a_loader(loader, is_told):
    called = StackFrame("accelerate", 0, f"{loader}.__iter__", False), of_torch("broadcast")
    judged = sampled_dataset([sampled((2, 20_000, "sleeps", MAIN, *called))], source="host").first
    line = CodeLine(file=MAIN.file, line=MAIN.line, function=MAIN.function, text=MAIN.text)
    assert is_dispatched(line, judged) == is_told
    assert not is_dispatched(msgspec.structs.replace(line, line=MAIN.line + 1), judged)


@pytest.mark.parametrize(
    ("leaf", "told"),
    [
        (of_torch("_unique_impl"), [("ordering", "normalise(), train.py:7", 0.5)]),
        (StackFrame("", 0, "torch.coalesce", False), [("ordering", "normalise(), train.py:7", 0.5)]),
        (of_torch("_no_grad_embedding_renorm_"), [("costly", "normalise(), train.py:7", 0.5)]),
        (StackFrame("", 0, "torch.isinf", False), [("costly", "normalise(), train.py:7", 0.5)]),
        (StackFrame("", 0, "torch.inverse", False), []),  # which the model may need
        (of_torch("softmax"), []),
        (StackFrame("", 0, "torch.topk", False), []),
        (of_torch("DistributedDataParallel._distributed_broadcast_coalesced"), []),
    ],
)
def test_what_orders_rows_within_the_model_can_be_done_before(leaf, told):
    """A model that computes in its own functions is no loss."""
    linear = StackFrame("train.py", 9, "Model.forward", True), of_torch("Linear.forward")
    normalise = StackFrame("train.py", 7, "normalise", True), leaf
    assert in_the_forward_pass(normalise, linear) == told


def test_a_thread_that_holds_the_interpreter_s_lock_is_none_of_the_model_s_python():
    """Samples of the waits for it show the stack of that thread."""
    path = StackFrame("batches.py", 12, "prepare", True), StackFrame("", 0, "str.join", False)
    assert [in_the_forward_pass(path, doing=doing) for doing in ("runs", "locked_out")] == [
        [("in_passes", "prepare(), batches.py:12", 1.0)],
        [],
    ]


SOURCE = """
class Model:
    def pool(self, h, lengths):
        h = h.tanh()
        for row, length in zip(h, lengths):
            n = length.item()
            parts.append(self.head(row[:n]).mean(0))
        return torch.cat(parts)
        for row in h:
            for tag in range(9):
                best.append(row.logsumexp(0))
        assert not torch.isnan(h).any()
        return torch.where(torch.isnan(h), 0.0, h)
"""


@pytest.mark.parametrize(
    ("line", "leaf", "written_ns", "told"),
    [
        pytest.param(7, None, 0, ["reading"], id="in-the-loop"),
        pytest.param(7, "Linear.forward", 0, [], id="in-a-module-that-it-calls"),
        pytest.param(7, "Conv1d._conv_forward", 0, [], id="in-a-convolution"),
        pytest.param(12, "isnan", 0, ["costly"], id="in-a-check"),
        pytest.param(13, "isnan", 0, [], id="in-a-mask"),
        pytest.param(4, None, 0, [], id="before-it"),
        pytest.param(9, None, 0, [], id="in-another-loop"),
        pytest.param(11, "logsumexp", 0, ["reading"], id="in-loops-within-loops"),
        pytest.param(8, "cat", 0, [], id="behind-it"),
        pytest.param(7, None, 1 << 62, [], id="in-a-newer-source"),
        pytest.param(7, None, None, [], id="without-source"),
    ],
)
def test_a_loop_that_reads_values_is_told_by_its_source(tmp_path, line, leaf, written_ns, told):
    """A count of the model without data came to item() in line 6."""
    file = tmp_path / "net.py"
    if written_ns is not None:
        file.write_text(SOURCE)
        os.utime(file, ns=(written_ns, written_ns))
    at = StackFrame(str(file), line, "Model.pool", True)
    path = (at, of_torch(leaf)) if leaf else (at,)
    linear = StackFrame("train.py", 9, "Model.forward", True), of_torch("Linear.forward")
    reason = "the forward pass reads values of tensors on the host (at Model.pool(), net.py:6)"
    found = in_the_forward_pass(path, linear, reason=reason, started_unix_ns=1 << 60)
    assert [(origin, text) for origin, text, _ in found] == [
        (one, f"Model.pool(), net.py:{line}") for one in told
    ]


def test_where_no_cause_is_named_the_line_that_takes_most_of_a_step_is(tmp_path):
    """10 of 40 ms, behind a backward pass of 30; a fifth of the step is an all_reduce."""
    judged = judged_with_stacks(
        tmp_path, lambda rank, step, noise: Host().work(32.0).comm(8.0), ("model", "forward", "runs", 10.0)
    )
    told = nothing_text(dataset("a", [judged]), Causes([]))
    assert (
        " Backward passes aside, Net.forward(), train.py:40 takes most, 10.0 ms: no loss of it is known."
        in told
    )
    text = causes_text(Causes([], title="", empty_text=told), judged)
    assert "Sampled, ms of a step: where the training thread is most." in text
