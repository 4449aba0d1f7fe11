"""A script that resumes itself under `aorta run`: one number a step over restarts, and nothing dropped."""

import io
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from aorta.account.load.open import load_run
from aorta.attach.position import Loaded, Position, mark_of_file, mark_of_weights, position_of, steps_of
from aorta.records.reader import read_run, read_steps
from aorta.records.state import MOST_SAVES, Save, kept_saves, read_states
from tests.attach import loops
from tests.dist.launch import run_ranks


def runs(
    folder: Path, *num_steps: int, kind: str = "AdamW", saving: str = "torch", every: int = 2
) -> list[tuple[int, int]]:
    """(attempt, global step) of each line after starts of that many steps each."""
    for number, count in enumerate(num_steps):
        arguments = (str(folder / "run"), str(folder / "checkpoint.pt"), count, kind, saving, every)
        environment = {"TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_RESTART_COUNT": str(number)}
        run_ranks(loops.resuming_loop, 1, *arguments, environment=environment | {"AORTA_RUN_ID": "mine"})
    path = folder / "run" / "rank_0_metrics.jsonl"
    return [(record.attempt, record.global_step) for record in read_steps(path)]


def told_by(folder: Path) -> list[str | None]:
    return [attempt.position_by for attempt in read_run(folder / "run").attempts]


@pytest.mark.parametrize(
    ("kind", "saving", "teller"),
    [("AdamW", "torch", "checkpoint"), ("AdamW", "pickle", "optimizer"), ("SGD", "bytes", "checkpoint")],
)
def test_steps_that_are_done_again_are_told(tmp_path: Path, kind: str, saving: str, teller: str) -> None:
    """Five steps, saved after the fourth: the second start resumes at step 4, and does it again. SGD keeps no
    count, but aorta knows at which step the program saved the file that it loads."""
    steps = runs(tmp_path, 5, 3, kind=kind, saving=saving)
    assert steps == [(0, 0), (0, 1), (0, 2), (0, 3), (0, 4), (1, 4), (1, 5), (1, 6)]
    assert told_by(tmp_path) == ["program", teller]
    assert "num_threads" in read_run(tmp_path / "run").program["modes"]  # of the second start
    joined = load_run(tmp_path / "run", "joined")
    assert joined.global_step.tolist() == list(range(7))
    assert "step 4 was done in attempt 0 and again in attempt 1: the last time counts" in joined.notes


def test_what_is_saved_before_steps_are_recognised_is_known_too(tmp_path: Path) -> None:
    """One call of an optimizer does not tell what makes an iteration: of a file saved behind it neither."""
    runs(tmp_path, 2, kind="SGD", every=1)
    assert [(save.position, save.mark[0]) for save in read_states(tmp_path / "run")[0].process.saves] == [
        (0, "w"),
        (1, "f"),
        (2, "f"),
    ]


def test_where_nothing_tells_the_position_no_step_is_dropped(tmp_path: Path) -> None:
    """SGD without momentum keeps no count, and pickle's file is not seen."""
    assert [step for _, step in runs(tmp_path, 5, 3, kind="SGD", saving="pickle")] == list(range(8))
    assert told_by(tmp_path) == ["program", None]
    joined = load_run(tmp_path / "run", "joined")
    assert joined.global_step.tolist() == list(range(8))
    assert not any("again" in note for note in joined.notes)


def test_a_start_that_loads_nothing_begins_again(tmp_path: Path) -> None:
    assert [step for _, step in runs(tmp_path, 3, 4, saving="")] == [0, 1, 2, 0, 1, 2, 3]
    assert told_by(tmp_path) == ["program", "weights"]


def a_file(folder: Path, name: str, value: int) -> str:
    path = folder / name
    torch.save({"weights": torch.full((64,), float(value)), "step": value}, path)
    mark = mark_of_file(path)
    assert mark is not None
    return mark


def test_a_file_is_known_again_wherever_it_lies_and_by_its_content_alone(tmp_path: Path) -> None:
    first, second = a_file(tmp_path, "a", 1), a_file(tmp_path, "b", 2)
    content = (tmp_path / "a").read_bytes()
    (tmp_path / "copy").write_bytes(content)
    assert first != second
    assert mark_of_file(str(tmp_path / "copy")) == mark_of_file(io.BytesIO(content)) == first
    assert mark_of_file(tmp_path) is mark_of_file(object()) is None


def loaded(*marks: str) -> Loaded:
    result = Loaded()
    result.anything, result.marks = bool(marks), list(marks)
    return result


def stepped(count: int) -> torch.optim.Optimizer:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([weight], lr=0.1)
    for _ in range(count):
        weight.grad = torch.ones(2)
        optimizer.step()
    return optimizer


def test_of_files_that_were_loaded_the_one_of_the_optimizer_counts() -> None:
    """The best checkpoint is looked at after the latest one was loaded."""
    saves = [Save(0, "w"), Save(4, "best", 4), Save(9, "latest", 9), Save(7, "same"), Save(8, "same")]
    assert position_of([stepped(9)], loaded("latest", "best"), saves) == Position(9, "checkpoint")
    assert position_of([stepped(5)], loaded("latest", "best"), saves) == Position(5, "optimizer")
    assert position_of([], loaded("latest", "best"), saves) == Position(4, "checkpoint")
    assert position_of([], loaded("another"), saves) is None
    assert position_of([], loaded("same"), saves) is None, "it was saved alike at two steps"
    assert position_of([], loaded("another"), saves, "w") == Position(0, "weights")


def test_what_is_kept_of_saves_is_the_beginning_and_the_latest() -> None:
    saves = [Save(0, "w"), Save(0, "w"), *(Save(step, f"f{step}") for step in range(1, 40))]
    kept = kept_saves(saves)
    assert [save.position for save in kept] == [0, *range(40 - MOST_SAVES, 40)]


@pytest.mark.parametrize(("kind", "num_steps"), [("Adam", 3), ("NAdam", 3), ("Adagrad", 3), ("SGD", None)])
def test_what_optimizers_know_of_their_steps(kind: str, num_steps: int | None) -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = getattr(torch.optim, kind)([weight], lr=0.1)
    for _ in range(3):
        weight.grad = torch.ones(2)
        optimizer.step()
    expected = None if num_steps is None else Position(num_steps, "optimizer")
    assert position_of([optimizer], loaded("x")) == expected


def test_of_several_optimizers_the_one_with_fewest_steps_counts() -> None:
    assert position_of([stepped(4), stepped(2)], loaded("x")) == Position(2, "optimizer")
    assert position_of([], Loaded()) == Position(0, "program")
    assert position_of([], loaded("x")) is None


def test_parameters_whose_memory_was_given_back_are_not_read():
    """Programs that offload free a parameter's memory and leave its shape: reading it would kill them."""
    weights = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3))
    optimizer = torch.optim.SGD([weights], lr=0.1)
    assert mark_of_weights([optimizer], 2) is not None
    assert mark_of_weights([optimizer], 2) != mark_of_weights([optimizer], 4)
    weights.untyped_storage().resize_(0)
    assert mark_of_weights([optimizer], 2) is None


def test_a_save_reads_no_count_that_is_on_a_device_and_none_that_is_no_number():
    """To read it would wait for the device at every torch.save of the program."""
    weights = torch.nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([weights], lr=0.1)
    optimizer.state[weights]["step"] = SimpleNamespace(is_cuda=True, __int__=lambda self: 7)
    assert steps_of([optimizer], may_wait=False) is None
    optimizer.state[weights]["step"] = [1]
    assert steps_of([optimizer]) is None
    optimizer.state[weights]["step"] = 5
    assert steps_of([optimizer], may_wait=False) == 5
