"""A script that resumes itself under `aorta run`: one number a step over restarts, and nothing dropped."""

from pathlib import Path

import pytest
import torch

from aorta.account.load.open import load_run
from aorta.attach.position import Position, position_of
from aorta.records.reader import read_run, read_steps
from tests.attach import loops
from tests.dist.launch import run_ranks


def runs(folder: Path, *num_steps: int, kind: str = "AdamW", saved: bool = True) -> list[tuple[int, int]]:
    """(attempt, global step) of each line after starts of that many steps each."""
    for number, count in enumerate(num_steps):
        arguments = (str(folder / "run"), str(folder / "checkpoint.pt"), count, kind, saved)
        environment = {"TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_RESTART_COUNT": str(number)}
        run_ranks(loops.resuming_loop, 1, *arguments, environment=environment | {"AORTA_RUN_ID": "mine"})
    path = folder / "run" / "rank_0_metrics.jsonl"
    return [(record.attempt, record.global_step) for record in read_steps(path)]


def test_the_optimizers_state_tells_which_steps_are_done_again(tmp_path: Path) -> None:
    """Five steps, saved after the fourth: the second start resumes at step 4, and does it again."""
    assert runs(tmp_path, 5, 3) == [(0, 0), (0, 1), (0, 2), (0, 3), (0, 4), (1, 4), (1, 5), (1, 6)]
    assert [attempt.position_by for attempt in read_run(tmp_path / "run").attempts] == [
        "program",
        "optimizer",
    ]
    joined = load_run(tmp_path / "run", "joined")
    assert joined.global_step.tolist() == list(range(7))
    assert "step 4 was done in attempt 0 and again in attempt 1: the last time counts" in joined.notes


def test_where_nothing_tells_the_position_no_step_is_dropped(tmp_path: Path) -> None:
    """SGD without momentum keeps no count."""
    assert [step for _, step in runs(tmp_path, 5, 3, kind="SGD")] == list(range(8))
    assert read_run(tmp_path / "run").attempts[1].position_by is None
    joined = load_run(tmp_path / "run", "joined")
    assert joined.global_step.tolist() == list(range(8))
    assert not any("again" in note for note in joined.notes)


def test_a_start_that_loads_nothing_begins_again(tmp_path: Path) -> None:
    assert [step for _, step in runs(tmp_path, 3, 4, saved=False)] == [0, 1, 2, 0, 1, 2, 3]


@pytest.mark.parametrize(("kind", "num_steps"), [("Adam", 3), ("NAdam", 3), ("Adagrad", 3), ("SGD", None)])
def test_what_optimizers_know_of_their_steps(kind: str, num_steps: int | None) -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = getattr(torch.optim, kind)([weight], lr=0.1)
    for _ in range(3):
        weight.grad = torch.ones(2)
        optimizer.step()
    expected = None if num_steps is None else Position(num_steps, "optimizer")
    assert position_of([optimizer], has_loaded=True) == expected


def test_of_several_optimizers_the_one_with_fewest_steps_counts() -> None:
    optimizers = []
    for count in (4, 2):
        weight = torch.nn.Parameter(torch.ones(2))
        optimizers.append(torch.optim.Adam([weight], lr=0.1))
        for _ in range(count):
            weight.grad = torch.ones(2)
            optimizers[-1].step()
    assert position_of(optimizers, has_loaded=True) == Position(2, "optimizer")
    assert position_of([], has_loaded=False) == Position(0, "program")
