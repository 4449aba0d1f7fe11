"""Losses planted in communication."""

import os
from typing import Any

import torch
import torch.distributed as dist
from planted.job import Rank, fitted, plain, sharded, squared, steps, train
from torch.nn.parallel import DistributedDataParallel


def tiny_buckets(rank: Rank, recorder: Any, num: int) -> None:
    if rank.is_cuda:
        rank.width = 512
    train(rank, recorder, num, bucket_mb=0.001, depth=6 * rank.depth)


def small_all_reduces(rank: Rank, recorder: Any, num: int) -> None:
    small = [torch.ones(256, device=rank.device) for _ in range(400 if rank.is_cuda else 60)]

    def hook(step: int, loss: torch.Tensor) -> None:
        for one in small:
            dist.all_reduce(one)

    train(rank, recorder, num, in_step=hook)


def no_prefetch(rank: Rank, recorder: Any, num: int) -> None:
    sharded(rank, recorder, num, prefetch=False)


def shared_communicator(rank: Rank, recorder: Any, num: int) -> None:
    """A small call that the step waits for stands behind a large one that it does not wait for."""
    large = torch.ones((256 << 20) if rank.is_cuda else (2 << 20), device=rank.device)
    small = torch.ones(8, device=rank.device)
    for _ in range(num):
        with recorder.step(tokens=rank.batch):
            rank.compute(4)
            work = dist.all_reduce(large, async_op=True)
            if not rank.is_cuda:  # gloo runs two calls of a group at once
                more = dist.all_reduce(large.clone(), async_op=True)
            dist.all_reduce(small)
            rank.compute(4 if rank.is_cuda else 16)
            work.wait()
            if not rank.is_cuda:
                more.wait()


def gathered_objects(rank: Rank, recorder: Any, num: int) -> None:
    """Predictions of every rank are gathered as Python objects in every step."""
    predictions = os.urandom(8 << 20)

    def hook(step: int, loss: torch.Tensor) -> None:
        everybodys: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everybodys, predictions)

    train(rank, recorder, num, in_step=hook)


def large_buffers(rank: Rank, recorder: Any, num: int) -> None:
    """DDP sends rank 0's buffers to all ranks before every forward."""
    inner = rank.model(2)
    inner.register_buffer("cache", torch.ones(8 << 20))
    model = DistributedDataParallel(inner, broadcast_buffers=True)
    steps(rank, recorder, num, model, lambda step: squared(model, rank.batch_of()))


def many_barriers(rank: Rank, recorder: Any, num: int) -> None:
    def hook(step: int, loss: torch.Tensor) -> None:
        for _ in range(60):
            dist.barrier()

    train(rank, recorder, num, in_step=hook)


def one_bucket(rank: Rank, recorder: Any, num: int) -> None:
    """All gradients in one bucket, whose all-reduce begins when backward is over."""
    plain(rank, recorder, num, rows=rank.batch, bucket_cap_mb=10_000)


def gradient_penalty(rank: Rank, recorder: Any, num: int) -> None:
    """The parameters of all ranks are averaged, by hand, in every step."""
    parameters = torch.ones(6 << 20)

    def hook(step: int, loss: torch.Tensor) -> None:
        dist.all_reduce(parameters)

    train(rank, recorder, num, in_step=hook)


def metrics_each_step(rank: Rank, recorder: Any, num: int) -> None:
    """Eighty metrics, an all-reduce each."""

    def hook(step: int, loss: torch.Tensor) -> None:
        for _ in range(80):
            dist.all_reduce(torch.ones(1))

    train(rank, recorder, num, in_step=hook)


def broadcast_parameters(rank: Rank, recorder: Any, num: int) -> None:
    """Rank 0 sends each of many parameters by itself in every step."""
    parameters = [torch.ones(64, device=rank.device) for _ in range(400 if rank.is_cuda else 100)]

    def before(step: int) -> None:
        for parameter in parameters:
            dist.broadcast(parameter, 0)

    fitted(rank, recorder, num, before=before)


def clip_by_parameter(rank: Rank, recorder: Any, num: int) -> None:
    """The norm of each parameter is summed over the ranks by itself."""
    norms = [torch.ones(1, device=rank.device) for _ in range(300 if rank.is_cuda else 80)]

    def hook(step: int, loss: torch.Tensor) -> None:
        for norm in norms:
            dist.all_reduce(norm)

    train(rank, recorder, num, in_step=hook)


def gathered_activations(rank: Rank, recorder: Any, num: int) -> None:
    """Large activations are gathered from all ranks before the forward pass."""
    part = torch.ones((64 << 20) if rank.is_cuda else (4 << 20), device=rank.device)
    whole = torch.empty(dist.get_world_size() * part.numel(), device=rank.device)

    def before(step: int) -> None:
        dist.all_gather_into_tensor(whole, part)

    fitted(rank, recorder, num, before=before)


def averages_sometimes(rank: Rank, recorder: Any, num: int) -> None:
    """Weights are averaged in every fifth step."""
    weights = torch.ones(16 << 20)

    def hook(step: int, loss: torch.Tensor) -> None:
        if step % 5 == 0:
            dist.all_reduce(weights)

    train(rank, recorder, num, in_step=hook)
