"""Phases of the judged steps with their lines, and the largest in a sentence."""

import msgspec
import numpy as np
import pytest

from aorta.account.judge.cells import account_of
from aorta.account.judge.phases import (
    evaluation_text,
    growth_text,
    largest_text,
    phase_steps,
    phases_of,
    variance_of_own_code,
)
from aorta.account.load.rank.phases import BYTES, PREFIX, STEP
from aorta.records.schema import NO_CALL, WorkOfStep
from aorta.records.stacks import StackFrame
from aorta.records.workers import AWAITED, WORKER_STATES, WorkerChunk, WorkerSample
from tests.account.judge.sampled_runs import AUGMENT, ENGINE, MAIN, MODEL, TRAINER, sampled, sampled_dataset
from tests.records import plain_records


def judged_with(stacks=None, **phases):
    """Two ranks; ms of each phase in every step, twice as much on rank 1. Steps take 40 ms."""
    stacks = stacks or sampled(*((step, 10_000, "runs", MAIN, AUGMENT) for step in range(2, 12)))
    judged = sampled_dataset([stacks, stacks]).first
    shape = judged.metrics["step_ms"].shape
    return msgspec.structs.replace(
        judged,
        metrics={**judged.metrics, "step_ms": np.full(shape, 40.0)},
        host_parts={STEP: np.full(shape, 40.0)}
        | {f"{PREFIX}{name}": np.full(shape, ms) * np.array([[1.0], [2.0]]) for name, ms in phases.items()},
    )


def test_phases_add_up_to_the_step_and_are_in_its_order():
    rows = phases_of(judged_with(backward=8.0, data=2.0, forward=4.0))
    assert [(row.phase, row.ms) for row in rows] == [
        ("data", 3.0), ("forward", 6.0), ("backward", 12.0), ("rest", 40.0 - 21.0),
    ]  # fmt: skip
    assert rows[2].by_rank_ms == [8.0, 16.0]
    assert rows[2].share == pytest.approx(0.3)
    assert {row.num_steps for row in rows} == {10}


def test_phases_of_a_host_that_runs_ahead_are_told_of_the_account_s_step():
    """The host's step takes 40 ms of the device's 50: 24 ms of forward pass in it are 30 of the step."""
    judged = judged_with(forward=16.0)
    slower = {"step_ms": np.full_like(judged.metrics["step_ms"], 50.0)}
    ahead = msgspec.structs.replace(judged, metrics=judged.metrics | slower)
    told_ms = account_of(ahead).mean_step_ms
    row = phases_of(ahead)[0]
    assert row.ms == pytest.approx(0.6 * told_ms)
    assert row.by_rank_ms == pytest.approx([0.4 * told_ms, 0.8 * told_ms])
    assert sum(row.ms for row in phases_of(ahead)) == pytest.approx(told_ms)
    assert told_ms == 50.0


@pytest.mark.parametrize(
    ("state", "place"),
    [("fetches", "get(), rows.py:9, in workers"), ("waits", "")],
)
def test_loading_is_in_the_line_of_workers_that_it_waits_for(state, place):
    def workers(rank):
        sample = WorkerSample(WORKER_STATES.index(state), AWAITED, 0, 0, 1_000_000, 20)
        frames = [StackFrame("/data/rows.py", 9, "get", True)]
        return [WorkerChunk(num_workers=2, frames=frames, nodes=[(-1, 0)], samples=[sample])]

    stacks = sampled(*((step, 10_000, "runs", MAIN, AUGMENT) for step in range(2, 12)))
    (row, *_) = phases_of(msgspec.structs.replace(judged_with(stacks, data=16.0), workers=workers))
    assert (row.phase, row.at) == ("data", place)


def test_the_largest_phase_is_said_with_its_line():
    """Samples of no known phase before a backward pass are what the loop does for the forward pass."""
    text = largest_text(judged_with(forward=16.0, backward=4.0))
    of_step = "24.0 ms of 40.0 ms (host's clock, 10 steps)"
    assert text == f"The largest phase is forward: {of_step}, most of it in augment(), data.py:5."


@pytest.mark.parametrize(
    ("phases", "place"),
    [
        pytest.param({"forward": 2.0, "backward": 16.0}, "", id="the-line-that-calls-backward"),
        pytest.param(
            {"forward": 16.0, "backward": 2.0},
            ", most of it in augment(), data.py:5",
            id="a-line-of-the-model",
        ),
    ],
)
def test_the_line_that_calls_backward_is_said_of_no_backward_pass(phases, place):
    def row(*path):
        return [(step, 10_000, "runs", MAIN, *path) for step in range(2, 12)]

    stacks = sampled(*row(AUGMENT, MODEL), *row(ENGINE))
    assert largest_text(judged_with(stacks, **phases)).removesuffix(".").endswith(f"steps){place}")


def test_what_a_library_s_loop_does_beside_both_passes_is_no_largest_phase():
    """Trainer.train() runs all of a step in one line of the program, and waits there."""
    paths = (MAIN, MODEL), (MAIN, ENGINE), (MAIN, TRAINER)
    stacks = sampled(*((step, 10_000, "runs", *path) for path in paths for step in range(2, 12)))
    judged = judged_with(stacks, forward=4.0, backward=4.0)
    assert [row.line.text for row in phases_of(judged) if row.line] == ["main(), train.py:20"] * 3
    assert largest_text(judged) == ""


@pytest.mark.parametrize(("compute_ms", "does"), [(36.0, ", waiting for the device"), (20.0, "")])
def test_a_wait_for_a_busy_device_is_no_code_of_a_phase(compute_ms, does):
    item = StackFrame("", 0, "item", is_program=False)
    stacks = sampled(*((step, 10_000, "runs", MAIN, AUGMENT, item) for step in range(2, 12)))
    judged = judged_with(stacks, forward=16.0, backward=4.0)
    parts = {"compute_ms": compute_ms, "exposed_ms": 2.0, "idle_ms": 38.0 - compute_ms}
    shape = judged.metrics["step_ms"].shape
    metrics = judged.metrics | {name: np.full(shape, ms) for name, ms in parts.items()}
    text = largest_text(msgspec.structs.replace(judged, metrics=metrics))
    assert text.endswith(f"most of it in augment(), data.py:5{does}.")


def test_code_of_the_loop_before_a_backward_pass_is_no_forward_pass():
    """An average of the weights behind the update that ended the step: a quarter of the samples."""
    stacks = sampled(
        *((step, 30_000, "runs", MAIN, MODEL) for step in range(2, 12)),
        *((step, 10_000, "runs", MAIN, AUGMENT) for step in range(2, 12)),
    )
    judged = judged_with(stacks, forward=16.0, backward=4.0)
    rows = {row.phase: row for row in phases_of(judged)}
    assert rows["forward"].ms == pytest.approx(0.75 * 24.0)
    assert rows["rest"].ms == pytest.approx(0.25 * 24.0 + 10.0)
    steps = phase_steps(judged)  # as two runs are compared by
    assert {name: steps[name].mean() for name in rows} == pytest.approx(
        {name: row.ms for name, row in rows.items()}
    )
    # 40 samples: the share of such a binomial, of 24 of 40 ms.
    assert variance_of_own_code(judged) == pytest.approx((24 / 40) ** 2 * 0.25 * 0.75 / 40)
    assert (rows["forward"].line.text, rows["rest"].line.text) == (
        "main(), train.py:20",
        "augment(), data.py:5",
    )


def test_a_model_that_no_sample_shows_leaves_what_is_before_backward_to_the_program():
    """Of 20 samples none is in the model, which was counted: it has the time of one of 21, at most."""
    judged = judged_with(forward=16.0)
    assert {row.phase: row.ms for row in phases_of(judged)}["forward"] == pytest.approx(24.0)
    record = msgspec.structs.replace(judged.noted, work=WorkOfStep(flops=1.0, lines=[]))
    rows = {row.phase: row.ms for row in phases_of(msgspec.structs.replace(judged, record=record))}
    assert rows == {"forward": pytest.approx(24.0 / 21), "rest": pytest.approx(16.0 + 24.0 * 20 / 21)}


@pytest.mark.parametrize(
    ("own_ms", "model_ms", "not_measured", "title"),
    [
        pytest.param(20, 10, {}, "what comes before the backward pass", id="mostly-own"),
        pytest.param(10, 20, {}, "forward", id="mostly-the-model"),
        pytest.param(20, 10, {"flops_per_step": NO_CALL}, "forward", id="a-model-without-modules"),
        pytest.param(20, 0, {}, "forward", id="too-few-to-tell"),
    ],
)
def test_few_samples_of_the_program_s_own_code_are_not_said_to_be_a_forward_pass(
    own_ms, model_ms, not_measured, title
):
    """Two at most of each rank are too few to divide the phase: it is what comes before the backward pass."""
    paths = ((own_ms, AUGMENT), (model_ms, MODEL))
    stacks = sampled(*((2, 1000 * ms, "runs", MAIN, leaf) for ms, leaf in paths if ms))
    judged = judged_with(stacks, forward=16.0)
    record = msgspec.structs.replace(judged.noted, not_measured=not_measured)
    text = largest_text(msgspec.structs.replace(judged, record=record))
    assert text.startswith(f"The largest phase is {title}: 24.0 ms of 40.0 ms")


@pytest.mark.parametrize(
    ("collecting_ms", "title", "place"),
    [
        (35.0, "what comes before the backward pass", ", most of it Python's garbage collections"),
        (25.0, "forward", ", most of it in main(), train.py:20"),  # 16 of them may lie beside the phase
        (0.0, "forward", ", most of it in main(), train.py:20"),
    ],
)
def test_garbage_collections_that_have_no_room_beside_a_phase_are_said_of_it(collecting_ms, title, place):
    """No sample shows them: they keep the lock that samples are taken with."""
    judged = judged_with(
        sampled(*((step, 10_000, "runs", MAIN, MODEL) for step in range(2, 12))), forward=16.0
    )
    parts = {"compute_ms": 40.0 - collecting_ms, "exposed_ms": 0.0, "idle_ms": collecting_ms}
    shape = judged.metrics["step_ms"].shape
    hosts = {"host.idle.garbage_collection": np.full(shape, collecting_ms)}
    judged = msgspec.structs.replace(
        judged,
        metrics=judged.metrics | {name: np.full(shape, ms) for name, ms in parts.items()},
        host_parts=judged.host_parts | hosts,
    )
    assert account_of(judged).mean_ms("garbage_collection") == pytest.approx(collecting_ms)
    of_step = "24.0 ms of 40.0 ms (host's clock, 10 steps)"
    assert largest_text(judged) == f"The largest phase is {title}: {of_step}{place}."


@pytest.mark.parametrize(
    ("forward", "others", "text"),
    [
        pytest.param(lambda part: 8 + 16 * part, lambda part: 20, "10.0 ms", id="all-along-the-run"),
        pytest.param(lambda part: 8 + 16 * part, lambda part: 20 + 40 * part, "", id="all-of-the-step"),
        pytest.param(lambda part: min(8 + 64 * part, 24), lambda part: 20, None, id="a-warm-up"),
        pytest.param(lambda part: 8 + 16 * (part > 0.5), lambda part: 20, None, id="a-jump"),
        pytest.param(lambda part: 24 - 16 * part, lambda part: 20, None, id="it-falls"),
        pytest.param(lambda part: 20 + 2 * part, lambda part: 20, None, id="by-a-little"),
    ],
)
def test_a_phase_grows_all_along_the_run_or_is_not_said_to(forward, others, text):
    """By 128 steps of which one in ten has samples; a tenth of noise."""
    num, noise = 130, np.random.default_rng(0)
    stacks = sampled(*((step, 10_000, "runs", MAIN, AUGMENT) for step in range(2, num, 10)))
    judged = sampled_dataset([stacks], num_steps=num).first
    part = np.clip((np.arange(num) - 2) / (num - 3), 0, 1)
    forward, others = (
        np.vectorize(of, otypes=[float])(part) * noise.normal(1, 0.1, num) for of in (forward, others)
    )
    hosts = {STEP: forward + others, f"{PREFIX}forward": forward}
    judged = msgspec.structs.replace(judged, host_parts={name: ms[None] for name, ms in hosts.items()})
    line = phases_of(judged)[0].line
    told = growth_text(judged, line, rank=0)
    assert told.startswith("it grows: what comes before the backward pass takes") == bool(text)
    assert bool(told) == bool(text)
    is_of_all = text == ""
    assert bool(growth_text(judged, line, rank=0, is_expected=True)) == (bool(text) or is_of_all)


@pytest.mark.parametrize(
    ("times", "s", "text"),
    [
        (3, 1.5, "Evaluations took 1.50 s in no step, 3 times, most of it in augment(), data.py:5."),
        (1, 1.5, "Evaluations took 1.50 s in no step, 1 time, most of it in augment(), data.py:5."),
        pytest.param(3, 0.001, "", id="too-short"),
    ],
)
def test_evaluations_in_no_step_are_told_with_their_line(times, s, text):
    stacks = sampled(
        (2, 10_000, "runs", MAIN), *((-1, 10_000, "runs", MAIN, AUGMENT, MODEL) for _ in range(3))
    )
    judged = judged_with(stacks, forward=16.0, backward=4.0)
    record = plain_records.run(coverage={"evaluations": {"times": times, "s": s}})
    judged = msgspec.structs.replace(judged, record=record)
    assert evaluation_text(judged) == text


def test_the_memory_of_a_phase_is_the_most_of_all_ranks_and_judged_steps():
    judged = judged_with(forward=16.0, backward=4.0)
    seen = np.full(judged.metrics["step_ms"].shape, np.nan)
    seen[:, : judged.num_warmup], seen[0, -1], seen[1, -2] = 9e9, 2e9, 3e9
    parts = {**judged.host_parts, f"{BYTES}forward": seen}
    judged = msgspec.structs.replace(judged, host_parts=parts)
    assert {row.phase: row.bytes for row in phases_of(judged)} == {
        "forward": 3e9,
        "backward": None,
        "rest": None,
    }


def test_steps_that_do_not_show_their_phases_are_left_out():
    judged = judged_with(forward=16.0, backward=4.0)
    judged.host_parts[f"{PREFIX}forward"][1, -4:] = np.nan
    assert phases_of(judged)[0].num_steps == 6


def test_a_run_without_spans_has_no_phases():
    judged = judged_with()
    assert (phases_of(judged), largest_text(judged)) == ([], "")
