"""Planted causes that are not in every step, and clean runs that look like them, on gloo.

    python benchmarks/planted_sometimes.py --output planted_causes_gloo_sometimes.json

The same options and rows as benchmarks/planted_causes.py.
"""

import json
import random
import time
from typing import Any

import planted_causes
import torch
import torch.distributed as dist
from planted_causes import PAUSE_S, Case, Rank, train
from torch.nn.parallel import DistributedDataParallel

CPU = ("cpu",)
SOMETIMES = {
    "every_second_batch": Case("late_rank", who=0, on=CPU),
    "every_seventh_batch": Case("late_rank", who=1, on=CPU),
    "random_batches": Case("late_rank", who=1, on=CPU),
    "prints_sometimes": Case("late_rank", who=0, on=CPU),
    "evaluation_in_step": Case("pause", on=CPU),
    "samples_in_step": Case("pause", on=CPU),
    "writes_between": Case("between_steps", who=0, on=CPU),
    "averages_sometimes": Case("transfer", on=CPU),
    "clean_micro_steps": Case(None, on=CPU),
    "clean_lengths": Case(None, on=CPU),
    "clean_lengths_by_rank": Case(None, on=CPU),
}


def _batches(rank: Rank, recorder: Any, num: int, times: Any) -> None:
    """times: how many times as long a batch is, by step."""
    model = DistributedDataParallel(rank.model(2))
    update = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(num):
        rows = int(64 * times(step) * rank.batch)
        with recorder.step(tokens=rows):
            model(torch.randn(rows, rank.width)).square().mean().backward()
            update.step()
            update.zero_grad()


def every_second_batch(rank: Rank, recorder: Any, num: int) -> None:
    _batches(rank, recorder, num, lambda step: 3 if rank.rank == 0 and step % 2 == 1 else 1)


def every_seventh_batch(rank: Rank, recorder: Any, num: int) -> None:
    _batches(rank, recorder, num, lambda step: 6 if rank.rank == 1 and step % 7 == 3 else 1)


def random_batches(rank: Rank, recorder: Any, num: int) -> None:
    """One batch of rank 1 in four is five times as long."""
    chance = random.Random(7)
    is_long = [chance.random() < 0.25 for _ in range(num)]
    _batches(rank, recorder, num, lambda step: 5 if rank.rank == 1 and is_long[step] else 1)


def prints_sometimes(rank: Rank, recorder: Any, num: int) -> None:
    """Rank 0 sends its metrics somewhere slow, within every fourth step."""

    def hook(step: int, loss: torch.Tensor) -> None:
        if rank.rank == 0 and step % 4 == 0:
            time.sleep(2 * PAUSE_S)

    train(rank, recorder, num, in_step=hook)


def evaluation_in_step(rank: Rank, recorder: Any, num: int) -> None:
    """All ranks evaluate within every fourth step."""
    model = rank.model(4)

    def hook(step: int, loss: torch.Tensor) -> None:
        if step % 4 == 0:
            with torch.no_grad():
                for _ in range(6):
                    model(torch.ones(64 * rank.batch, rank.width))

    train(rank, recorder, num, in_step=hook)


def samples_in_step(rank: Rank, recorder: Any, num: int) -> None:
    """All ranks write an example as text, within every sixth step."""

    def hook(step: int, loss: torch.Tensor) -> None:
        if step % 6 == 5:
            json.dumps(torch.rand(120_000).tolist())

    train(rank, recorder, num, in_step=hook)


def writes_between(rank: Rank, recorder: Any, num: int) -> None:
    """Rank 0 writes between every third step and the next."""
    train(
        rank,
        recorder,
        num,
        after_step=lambda step: time.sleep(2 * PAUSE_S) if rank.rank == 0 and step % 3 == 0 else None,
    )


def averages_sometimes(rank: Rank, recorder: Any, num: int) -> None:
    """Weights are averaged in every fifth step."""
    weights = torch.ones(16 << 20)

    def hook(step: int, loss: torch.Tensor) -> None:
        if step % 5 == 0:
            dist.all_reduce(weights)

    train(rank, recorder, num, in_step=hook)


def clean_micro_steps(rank: Rank, recorder: Any, num: int) -> None:
    """A step is a micro-batch; gradients are reduced, and parameters updated, in every fourth one."""
    model = DistributedDataParallel(rank.model(2))
    update = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(num):
        with recorder.step(tokens=rank.batch):
            model.require_backward_grad_sync = step % 4 == 3
            model(torch.randn(32 * rank.batch, rank.width)).square().mean().backward()
            if step % 4 == 3:
                update.step()
                update.zero_grad()


def clean_lengths(rank: Rank, recorder: Any, num: int) -> None:
    """Sequences of all ranks are long in every fifth step; the tokens say so."""
    _batches(rank, recorder, num, lambda step: 3 if step % 5 == 0 else 1)


def clean_lengths_by_rank(rank: Rank, recorder: Any, num: int) -> None:
    """Lengths vary a little on each rank."""
    chance = random.Random(rank.rank)
    lengths = [chance.uniform(0.9, 1.1) for _ in range(num)]
    _batches(rank, recorder, num, lambda step: lengths[step])


def main() -> None:
    planted_causes.CASES.clear()
    planted_causes.CASES.update(SOMETIMES)
    planted_causes.BODIES.update({name: globals()[name] for name in SOMETIMES})
    planted_causes.main()


if __name__ == "__main__":
    main()
