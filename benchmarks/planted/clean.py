"""Programs without a loss, which no cause may be named of."""

import random
import threading
from typing import Any

import torch
import torch.distributed as dist
from planted.job import Batches, Rank, fitted, plain, read_in_step, sharded, squared, steps, varying
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader


def clean_prefetch(rank: Rank, recorder: Any, num: int) -> None:
    sharded(rank, recorder, num, prefetch=True)


def clean_ddp(rank: Rank, recorder: Any, num: int) -> None:
    plain(rank, recorder, num)


def clean_async(rank: Rank, recorder: Any, num: int) -> None:
    """An all-reduce that compute hides."""
    tensor = torch.ones(256 << 10, device=rank.device)
    for _ in range(num):
        with recorder.step(tokens=rank.batch):
            work = dist.all_reduce(tensor, async_op=True)
            rank.compute(16 if not rank.is_cuda else 8)
            work.wait()


def clean_loader(rank: Rank, recorder: Any, num: int) -> None:
    """A loader that gives whole batches, which are there already."""
    read_in_step(rank, recorder, num, DataLoader(Batches(rank), batch_size=None), depth=2)


def clean_accumulation(rank: Rank, recorder: Any, num: int) -> None:
    """Two micro-batches; gradients are reduced with the second."""
    model = DistributedDataParallel(rank.model(2))

    def loss_of(step: int) -> torch.Tensor:
        with model.no_sync():
            squared(model, rank.rows(32 * rank.batch)).backward()
        return squared(model, rank.rows(32 * rank.batch))

    steps(rank, recorder, num, model, loss_of)


def clean_workers(rank: Rank, recorder: Any, num: int) -> None:
    """A loader with a process of its own that is quick enough."""
    loader = DataLoader(Batches(rank), batch_size=None, num_workers=1, prefetch_factor=2)
    read_in_step(rank, recorder, num, loader, depth=2)


def clean_scalar(rank: Rank, recorder: Any, num: int) -> None:
    """The loss is averaged over the ranks and read."""
    model = DistributedDataParallel(rank.model(2))

    def read_mean(step: int, loss: torch.Tensor) -> None:
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        mean.item()

    steps(
        rank, recorder, num, model, lambda step: squared(model, rank.rows(64 * rank.batch)), at_end=read_mean
    )


def clean_large(rank: Rank, recorder: Any, num: int) -> None:
    """Much computing and few gradients."""
    plain(rank, recorder, num, rows=128 * rank.batch)


def clean_thread(rank: Rank, recorder: Any, num: int) -> None:
    """A thread that mostly sleeps."""
    is_over = threading.Event()
    threading.Thread(target=lambda: is_over.wait(600), daemon=True).start()
    plain(rank, recorder, num)
    is_over.set()


def clean_static_graph(rank: Rank, recorder: Any, num: int) -> None:
    plain(rank, recorder, num, rows=96 * rank.batch, static_graph=True, gradient_as_bucket_view=True)


def clean_varying(rank: Rank, recorder: Any, num: int) -> None:
    """Batches of all ranks vary alike, by 20 %."""
    fitted(rank, recorder, num, rows=lambda step: 80 + (7 * step) % 17)


def clean_short_evaluation(rank: Rank, recorder: Any, num: int) -> None:
    """An evaluation of a millisecond after every tenth step."""
    model = rank.model(1)

    def after(step: int) -> None:
        if step % 10 == 9:
            with torch.no_grad():
                model(torch.ones(rank.batch, rank.width, device=rank.device))

    fitted(rank, recorder, num, rows=lambda step: 96, after=after)


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
    varying(rank, recorder, num, lambda step: 3 if step % 5 == 0 else 1)


def clean_lengths_by_rank(rank: Rank, recorder: Any, num: int) -> None:
    """Lengths vary a little on each rank."""
    chance = random.Random(rank.rank)
    lengths = [chance.uniform(0.9, 1.1) for _ in range(num)]
    varying(rank, recorder, num, lambda step: lengths[step])
