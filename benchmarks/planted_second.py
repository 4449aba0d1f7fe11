"""A second set of planted causes, on gloo: written before `aorta why` had seen one of them.

    python benchmarks/planted_second.py --output planted_causes_gloo_second.json --repeats 2

The same options and rows as benchmarks/planted_causes.py.
"""

import gc
import os
import subprocess
import sys
import tempfile
import time
from typing import Any

import planted_causes
import torch
import torch.distributed as dist
from planted_causes import PAUSE_S, PERIOD, Case, Rank, train
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

CPU = ("cpu",)
SECOND = {
    "automatic_collection": Case("garbage_collection", who=1, on=CPU),
    "longer_sequences": Case("late_rank", who=1, on=CPU),
    "starved_rank": Case("late_rank", who=1, on=CPU),
    "gathered_objects": Case("transfer", on=CPU),
    "large_buffers": Case("transfer", on=CPU),
    "many_barriers": Case("small_messages", on=CPU),
    "logging_rank": Case("between_steps", who=0, on=CPU),
    "evaluation": Case("between_steps", on=CPU),
    "checkpoint_rank": Case("checkpoint", who=0, on=CPU),
    "slow_transform": Case("data_loading", on=CPU),
    "restarted_workers": Case("data_loading", on=CPU),
    "unbalanced_stage": Case("late_rank", who=1, on=CPU),
    "unfused_optimizer": Case("optimizer", on=CPU),
    "clean_accumulation": Case(None, on=CPU),
    "clean_workers": Case(None, on=CPU),
    "clean_scalar": Case(None, on=CPU),
}


def plain(rank: Rank, recorder: Any, num: int, rows: int | None = None, **settings: Any) -> None:
    """DDP without a loader; 64 batches' worth of rows a step."""
    model = DistributedDataParallel(rank.model(2), **settings)
    update = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(num):
        with recorder.step(tokens=rank.batch):
            x = torch.randn(rows or 64 * rank.batch, rank.width, device=rank.device)
            model(x).square().mean().backward()
            update.step()
            update.zero_grad()


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


def longer_sequences(rank: Rank, recorder: Any, num: int) -> None:
    """Batches of one rank are twice as long, without padding."""
    plain(rank, recorder, num, rows=64 * rank.batch * (2 if rank.rank == 1 else 1))


def starved_rank(rank: Rank, recorder: Any, num: int) -> None:
    """Another program wants the core of rank 1."""
    cores = sorted(os.sched_getaffinity(0))
    core = cores[rank.rank % len(cores)]
    os.sched_setaffinity(0, {core})
    busy = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"])
        for _ in range(2 if rank.rank == 1 else 0)
    ]
    try:
        plain(rank, recorder, num)
    finally:
        for process in busy:
            process.kill()
            process.wait()
        os.sched_setaffinity(0, cores)


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
    update = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(num):
        with recorder.step(tokens=rank.batch):
            model(rank.batch_of()).square().mean().backward()
            update.step()
            update.zero_grad()


def many_barriers(rank: Rank, recorder: Any, num: int) -> None:
    def hook(step: int, loss: torch.Tensor) -> None:
        for _ in range(60):
            dist.barrier()

    train(rank, recorder, num, in_step=hook)


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


class Transformed(Dataset[torch.Tensor]):
    """Every sample goes through a Python loop."""

    def __init__(self, width: int) -> None:
        self.width = width

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> torch.Tensor:
        checksum = 0
        for i in range(30_000):
            checksum ^= i * index
        return torch.full((self.width,), float(checksum % 7))


def slow_transform(rank: Rank, recorder: Any, num: int) -> None:
    """num_workers=0: the samples are made by the training process."""
    model = DistributedDataParallel(rank.model())
    update = torch.optim.SGD(model.parameters(), lr=1e-3)
    loader = iter(DataLoader(Transformed(rank.width), batch_size=rank.batch))
    for _ in range(num):
        with recorder.step(tokens=rank.batch):
            model(next(loader)).square().mean().backward()
            update.step()
            update.zero_grad()


def restarted_workers(rank: Rank, recorder: Any, num: int) -> None:
    """An epoch is a few steps, and every epoch starts its worker anew."""
    model = DistributedDataParallel(rank.model())
    update = torch.optim.SGD(model.parameters(), lr=1e-3)
    samples = planted_causes.Samples(rank, 0.0)
    samples_of_epoch = torch.utils.data.Subset(samples, range(PERIOD * rank.batch))
    batches: Any = iter(())
    for _ in range(num):
        with recorder.step(tokens=rank.batch):
            x = next(batches, None)
            if x is None:
                batches = iter(DataLoader(samples_of_epoch, batch_size=rank.batch, num_workers=1))
                x = next(batches)
            model(x).square().mean().backward()
            update.step()
            update.zero_grad()


def unbalanced_stage(rank: Rank, recorder: Any, num: int) -> None:
    """Two pipeline stages; the second one has three layers of four."""
    stage = rank.model(3 if rank.rank == 1 else 1)
    rows = 16 * rank.batch
    for _ in range(num):
        with recorder.step(tokens=rank.batch):
            outputs = []
            for _ in range(4):
                if rank.rank == 0:
                    outputs.append(stage(torch.randn(rows, rank.width)))
                    dist.send(outputs[-1].detach(), 1)
                else:
                    x = torch.empty(rows, rank.width)
                    dist.recv(x, 0)
                    x.requires_grad_()
                    stage(x).square().mean().backward()
                    assert x.grad is not None
                    dist.send(x.grad, 0)
                if rank.rank == 0:
                    gradient = torch.empty(rows, rank.width)
                    dist.recv(gradient, 1)
                    outputs[-1].backward(gradient)


def unfused_optimizer(rank: Rank, recorder: Any, num: int) -> None:
    """Adam goes over hundreds of small parameters one by one."""
    layers: list[nn.Module] = []
    for _ in range(150):
        layers += [nn.Linear(16, 16), nn.Tanh()]
    model = DistributedDataParallel(nn.Sequential(*layers))
    update = torch.optim.Adam(model.parameters(), lr=1e-3, foreach=False)
    for _ in range(num):
        with recorder.step(tokens=rank.batch):
            model(torch.randn(rank.batch, 16)).square().mean().backward()
            update.step()
            update.zero_grad()


def clean_accumulation(rank: Rank, recorder: Any, num: int) -> None:
    """Two micro-batches; gradients are reduced with the second."""
    model = DistributedDataParallel(rank.model(2))
    update = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(num):
        with recorder.step(tokens=rank.batch):
            with model.no_sync():
                model(torch.randn(32 * rank.batch, rank.width)).square().mean().backward()
            model(torch.randn(32 * rank.batch, rank.width)).square().mean().backward()
            update.step()
            update.zero_grad()


def clean_workers(rank: Rank, recorder: Any, num: int) -> None:
    """A loader with a process of its own that is quick enough."""
    model = DistributedDataParallel(rank.model(2))
    update = torch.optim.SGD(model.parameters(), lr=1e-3)
    loader = iter(DataLoader(planted_causes.Batches(rank), batch_size=None, num_workers=1, prefetch_factor=2))
    for _ in range(num):
        with recorder.step(tokens=rank.batch):
            model(next(loader)).square().mean().backward()
            update.step()
            update.zero_grad()
    del loader


def clean_scalar(rank: Rank, recorder: Any, num: int) -> None:
    """The loss is averaged over the ranks and read."""
    model = DistributedDataParallel(rank.model(2))
    update = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(num):
        with recorder.step(tokens=rank.batch):
            loss = model(torch.randn(64 * rank.batch, rank.width)).square().mean()
            loss.backward()
            update.step()
            update.zero_grad()
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            mean.item()


def main() -> None:
    planted_causes.CASES.clear()
    planted_causes.CASES.update(SECOND)
    planted_causes.BODIES.update({name: globals()[name] for name in SECOND})
    planted_causes.main()


if __name__ == "__main__":
    main()
