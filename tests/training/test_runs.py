"""Whole runs of the trainer on gloo ranks: precisions, accumulation, resume."""

import logging
import logging.handlers

import pytest
import torch

from tests.dist.launch import run_ranks
from tests.training.tiny_runs import (
    FORMS,
    Settings,
    content,
    expect_agreed_error,
    expect_config_error,
    settings,
    train_all,
)


def test_the_loss_falls_in_every_form_and_precision(tmp_path):
    runs = [
        settings(
            tmp_path,
            **form,
            training={"max_steps": 7, "precision": precision, "batch_size": 8},
            optimizer={"lr": 5e-2},
        )
        for form in FORMS.values()
        for precision in ("fp32", "bf16", "fp16")
    ]
    for run, (summary, _) in zip(runs, run_ranks(train_all, 2, runs)[0], strict=True):
        assert summary.first_loss is not None
        assert summary.last_loss is not None
        assert summary.last_loss < 0.7 * summary.first_loss, (run, summary)


@pytest.mark.parametrize("form", ["ddp", "fsdp", "ep"])
def test_a_resumed_run_is_bit_equal_to_one_without_a_break(form, tmp_path):
    """10 steps with a checkpoint after 5, against 5 steps resumed from it."""
    straight = settings(
        tmp_path / "straight", **FORMS[form], training={"max_steps": 10, "checkpoint_every": 5}
    )
    checkpoint = tmp_path / "straight" / "checkpoints" / "step_00000005"
    resumed = settings(
        tmp_path / "resumed", **FORMS[form], training={"max_steps": 10, "resume": str(checkpoint)}
    )
    for rank_result in run_ranks(train_all, 2, [straight, resumed]):
        (first, expected), (second, parameters) = rank_result
        assert (second.first_step, second.num_steps) == (5, 10)
        assert second.last_loss == first.last_loss
        assert all(torch.equal(parameters[name], value) for name, value in expected.items())
    names = sorted(path.name for path in (tmp_path / "straight" / "checkpoints").iterdir())
    assert names == ["step_00000005", "step_00000010"]  # and nothing partial beside them


def test_latest_is_the_newest_checkpoint_or_a_fresh_start(tmp_path):
    fresh = settings(tmp_path, training={"max_steps": 4, "resume": "latest", "checkpoint_at_end": True})
    longer = settings(tmp_path, training={"max_steps": 6, "resume": "latest"})
    summaries = [summary for summary, _ in run_ranks(train_all, 1, [fresh, longer])[0]]
    assert [(s.first_step, s.num_steps) for s in summaries] == [(0, 4), (4, 6)]


def test_a_fresh_run_is_refused_a_folder_that_holds_checkpoints(tmp_path):
    saved = settings(tmp_path, training={"max_steps": 4, "checkpoint_every": 2})
    run_ranks(train_all, 2, [saved])
    folder = tmp_path / "checkpoints"
    before = content(folder)
    fresh = settings(tmp_path, training={"max_steps": 3, "checkpoint_at_end": True})
    said = run_ranks(expect_agreed_error, 2, fresh)
    assert said == [
        f"{folder} holds checkpoints of an earlier run, the newest is step_00000004; continue it with "
        "training.resume=latest or choose another training.output_dir or training.checkpoint_dir"
    ] * 2  # fmt: skip
    assert content(folder) == before
    without = settings(tmp_path, training={"max_steps": 3})
    from_2 = {"max_steps": 4, "resume": str(folder / "step_00000002"), "checkpoint_at_end": True}
    resumed = settings(tmp_path, training=from_2)
    summaries = [summary for summary, _ in run_ranks(train_all, 2, [without, resumed])[0]]
    assert [(s.first_step, s.num_steps) for s in summaries] == [(0, 3), (2, 4)]


def test_a_run_too_short_for_its_traces_says_so_once_counted_from_where_it_resumes(tmp_path):
    """The third step is profiled: there is one in 4 steps, none in the 2 after a checkpoint."""
    profiling = {"enabled": True, "wait": 1, "warmup": 1, "active": 1, "repeat": 1, "tensorboard": False}
    first = settings(tmp_path, training={"max_steps": 4, "checkpoint_at_end": True}, profiling=profiling)
    resumed = settings(tmp_path, training={"max_steps": 6, "resume": "latest"}, profiling=profiling)
    finished = settings(tmp_path, training={"max_steps": 4, "resume": "latest"}, profiling=profiling)
    said = run_ranks(warnings_of, 2, [first, finished, resumed])
    assert said[0] == [
        "profiling.enabled traces no step: profiling.wait = 1 and profiling.warmup = 1 must add up to less "
        "than the 2 steps that this run does",
    ]
    assert said[1] == []


def warnings_of(runs: list[Settings]) -> list[str]:
    """What this rank warned of on the way, in order, of traces that come to nothing."""
    handler = logging.handlers.BufferingHandler(10**6)
    logging.getLogger("aorta").addHandler(handler)
    train_all(runs)
    messages = [record.getMessage() for record in handler.buffer]
    return [message for message in messages if "traces no step" in message]


def test_a_checkpoint_of_another_layout_or_model(tmp_path):
    """Another layout resumes; another model is refused by name."""
    saved = settings(
        tmp_path, parallel={"mode": "fsdp"}, training={"max_steps": 4, "checkpoint_at_end": True}
    )
    run_ranks(train_all, 2, [saved])
    resumed = settings(tmp_path, parallel={"mode": "ddp"}, training={"max_steps": 6, "resume": "latest"})
    (summary, _) = run_ranks(train_all, 1, [resumed])[0][0]
    assert (summary.first_step, summary.num_steps) == (4, 6)
    other = settings(tmp_path, model={"num_layers": 1}, training={"resume": "latest"})
    assert "model.num_layers = 2, this run has 1" in run_ranks(expect_config_error, 1, other)[0]
    nowhere = settings(tmp_path, training={"resume": str(tmp_path)})
    assert "is not a checkpoint" in run_ranks(expect_config_error, 1, nowhere)[0]


def test_accumulated_micro_batches_equal_one_large_batch_in_count(tmp_path):
    """Epochs end a run where max_steps does not; each step counts all its micro-batches."""
    run = settings(
        tmp_path, training={"epochs": 2, "grad_accum_steps": 3}, data={"seq_len": 8, "steps_per_epoch": 3}
    )
    (summary, _) = run_ranks(train_all, 1, [run])[0][0]
    assert summary.num_steps == 6


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_compiled_blocks_train_as_eager_ones_do(form, tmp_path):
    runs = [
        settings(tmp_path, **FORMS[form], training={"max_steps": 3}, compile={"enabled": enabled})
        for enabled in (False, True)
    ]
    (eager, _), (compiled, _) = run_ranks(train_all, 2, runs)[0]
    assert compiled.last_loss == pytest.approx(eager.last_loss, rel=1e-4)
