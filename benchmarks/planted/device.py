"""Losses that only a GPU can have: launches, synchronisation, copies."""

from typing import Any

import torch
import torch.distributed as dist
from planted.job import Rank, fitted, steps
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def item_in_loop(rank: Rank, recorder: Any, num: int) -> None:
    """The host reads something after every layer, with little queued behind it."""
    model = rank.model(6 * rank.depth)
    update = torch.optim.SGD(model.parameters(), lr=1e-3, fused=True)

    def loss_of(step: int) -> torch.Tensor:
        x = rank.batch_of()
        for layer in model:
            x = layer(x)
            x.abs().max().item()
        return x.square().mean()

    steps(rank, recorder, num, model, loss_of, update, at_end=summed)


def summed(step: int, loss: torch.Tensor) -> None:
    dist.all_reduce(loss.detach())


def launch_bound(rank: Rank, recorder: Any, num: int) -> None:
    """Thousands of tiny kernels."""
    x = torch.ones(64, device=rank.device)
    for _ in range(num):
        with recorder.step(tokens=rank.batch):
            for _ in range(1500):
                x = x * 1.0001
            dist.all_reduce(x)


def layer_by_layer(rank: Rank, recorder: Any, num: int, look: Any) -> None:
    layers = [nn.Linear(rank.width, rank.width, device=rank.device) for _ in range(40)]
    model = nn.ModuleList(layers)
    update = torch.optim.SGD(model.parameters(), lr=1e-4, fused=True)

    def loss_of(step: int) -> torch.Tensor:
        x = rank.batch_of()
        for layer in layers:
            x = torch.relu(layer(x))
            look(x)
        return x.square().mean()

    steps(rank, recorder, num, model, loss_of, update, at_end=summed)


def synchronize_each_layer(rank: Rank, recorder: Any, num: int) -> None:
    layer_by_layer(rank, recorder, num, lambda x: torch.cuda.synchronize())


def nonzero_each_layer(rank: Rank, recorder: Any, num: int) -> None:
    layer_by_layer(rank, recorder, num, lambda x: x.nonzero())


def unrolled_cell(rank: Rank, recorder: Any, num: int) -> None:
    """A recurrent cell, a time step at a time."""
    cell = nn.GRUCell(64, 64).to(rank.device)
    model = DistributedDataParallel(cell)

    def loss_of(step: int) -> torch.Tensor:
        x = torch.randn(rank.batch, 64, device=rank.device)
        state = x
        for _ in range(100):
            state = cell(x, state)
        loss: torch.Tensor = model(x, state).square().mean()
        return loss

    steps(rank, recorder, num, model, loss_of)


def weights_to_host(rank: Rank, recorder: Any, num: int) -> None:
    """A copy of the weights goes to the host's memory in every step."""
    weights = torch.ones(192 << 20, device=rank.device)
    fitted(rank, recorder, num, before=lambda step: weights.cpu())
