"""Losses planted on the host: the optimizer, garbage, checkpoints, time between steps."""

import gc
import json
import tempfile
import time
from typing import Any

import torch
from planted.job import (
    PAUSE_S,
    PERIOD,
    Rank,
    fitted,
    squared,
    steps,
    train,
)
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import save
from torch.nn.parallel import DistributedDataParallel


class SlowSGD(torch.optim.Optimizer):
    """A plain optimizer as a researcher writes it: a Python loop over slices of every parameter."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-3})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                for row in range(0, parameter.shape[0], 2):
                    parameter[row : row + 2].add_(parameter.grad[row : row + 2], alpha=-group["lr"])


def host_bound_optimizer(rank: Rank, recorder: Any, num: int) -> None:
    train(rank, recorder, num, optimizer=lambda model: SlowSGD(model.parameters()))


def checkpoint(rank: Rank, recorder: Any, num: int) -> None:
    state = {"weights": torch.ones(3 << 20), "more": [torch.ones(64 << 10) for _ in range(40)]}
    with tempfile.TemporaryDirectory() as folder:

        def hook(step: int, loss: torch.Tensor) -> None:
            if step % PERIOD == 0:
                torch.save(state, f"{folder}/{rank.rank}.pt")

        train(rank, recorder, num, in_step=hook)


def garbage_collection(rank: Rank, recorder: Any, num: int) -> None:
    """A rank with many objects collects in single steps."""
    kept = [[{"a": [i]}] for i in range(200_000 if rank.rank == 1 else 10)]

    def hook(step: int, loss: torch.Tensor) -> None:
        if rank.rank == 1 and step % PERIOD == 2:
            gc.collect()

    train(rank, recorder, num, in_step=hook)
    del kept


def between_steps(rank: Rank, recorder: Any, num: int) -> None:
    train(rank, recorder, num, after_step=lambda step: time.sleep(PAUSE_S))


def automatic_collection(rank: Rank, recorder: Any, num: int) -> None:
    """Rank 1 holds many objects and makes circles of new ones: Python's own thresholds collect them."""
    kept = [[{"a": [i]}] for i in range(300_000 if rank.rank == 1 else 10)]
    thresholds = gc.get_threshold()
    gc.set_threshold(2_000, 2, 1)

    def hook(step: int, loss: torch.Tensor) -> None:
        for _ in range(4_000 if rank.rank == 1 else 10):
            circle: list[Any] = []
            circle.append(circle)
            kept.append(circle)

    train(rank, recorder, num, in_step=hook)
    gc.set_threshold(*thresholds)
    kept.clear()


def logging_rank(rank: Rank, recorder: Any, num: int) -> None:
    """Rank 0 writes a line of metrics to a slow place after every step."""
    train(rank, recorder, num, after_step=lambda step: time.sleep(PAUSE_S) if rank.rank == 0 else None)


def evaluation(rank: Rank, recorder: Any, num: int) -> None:
    """All ranks evaluate between some steps."""
    model = rank.model(4)

    def after(step: int) -> None:
        if step % PERIOD == 0:
            with torch.no_grad():
                for _ in range(12):
                    model(torch.ones(64 * rank.batch, rank.width))

    train(rank, recorder, num, after_step=after)


def checkpoint_rank(rank: Rank, recorder: Any, num: int) -> None:
    """Rank 0 writes, the others wait in their next collective."""
    state = {"weights": torch.ones(12 << 20)}
    with tempfile.TemporaryDirectory() as folder:

        def hook(step: int, loss: torch.Tensor) -> None:
            if step % PERIOD == 0 and rank.rank == 0:
                torch.save(state, f"{folder}/state.pt")

        train(rank, recorder, num, in_step=hook)


def unfused_optimizer(rank: Rank, recorder: Any, num: int) -> None:
    """Adam goes over hundreds of small parameters one by one."""
    layers: list[nn.Module] = []
    for _ in range(150):
        layers += [nn.Linear(16, 16), nn.Tanh()]
    model = DistributedDataParallel(nn.Sequential(*layers))
    update = torch.optim.Adam(model.parameters(), lr=1e-3, foreach=False)
    steps(rank, recorder, num, model, lambda step: squared(model, torch.randn(rank.batch, 16)), update)


def checkpoint_all(rank: Rank, recorder: Any, num: int) -> None:
    """Every rank writes its own part every few steps, within the step."""
    state = {"weights": torch.ones(12 << 20)}
    with tempfile.TemporaryDirectory() as folder:

        def hook(step: int, loss: torch.Tensor) -> None:
            if step % PERIOD == 0:
                torch.save(state, f"{folder}/state_{rank.rank}.pt")

        train(rank, recorder, num, in_step=hook)


def sharded_checkpoint(rank: Rank, recorder: Any, num: int) -> None:
    """torch.distributed.checkpoint writes every eight steps."""
    state = {f"layer.{i}": torch.ones(1 << 20) for i in range(12)}
    with tempfile.TemporaryDirectory() as folder:

        def before(step: int) -> None:
            if step % 8 == 5:
                save(state, checkpoint_id=f"{folder}/{rank.rank}_{step}", no_dist=True)

        fitted(rank, recorder, num, before=before)


def collection_each_step(rank: Rank, recorder: Any, num: int) -> None:
    """Every rank collects garbage by hand in every step, and holds many objects."""
    objects = [[{"a": [i]}] for i in range(150_000)]
    fitted(rank, recorder, num, before=lambda step: gc.collect())
    objects.clear()


def evaluation_rarely(rank: Rank, recorder: Any, num: int) -> None:
    """After every tenth step all ranks evaluate for as long as several steps take."""
    model = rank.model(2)

    def after(step: int) -> None:
        if step % 10 == 9:
            end = time.perf_counter() + 20 * PAUSE_S
            with torch.no_grad():
                while time.perf_counter() < end:
                    model(torch.ones(16 * rank.batch, rank.width, device=rank.device)).sum().item()

    fitted(rank, recorder, num, after=after)


class Lamb(torch.optim.Optimizer):
    """An optimizer as papers print it: each parameter by itself, with its norms read by the host."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-3})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                for chunk, gradient in zip(parameter.split(4), parameter.grad.split(4), strict=True):
                    ratio = chunk.norm() / (gradient.norm() + 1e-6)
                    chunk.sub_(gradient * ratio, alpha=group["lr"])


def python_lamb(rank: Rank, recorder: Any, num: int) -> None:
    train(rank, recorder, num, optimizer=lambda model: Lamb(model.parameters()))


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
