"""Programs that planted losses are made of: two ranks, a small model and a recorder."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

PAUSE_S = 0.03
"""Length of a planted delay."""
PERIOD = 5
"""Steps from one rare event to the next."""


@dataclass
class Rank:
    rank: int
    device: torch.device
    width: int
    batch: int
    depth: int

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    def model(self, num: int | None = None) -> nn.Sequential:
        layers: list[nn.Module] = []
        for _ in range(self.depth if num is None else num):
            layers += [nn.Linear(self.width, self.width), nn.GELU()]
        return nn.Sequential(*layers).to(self.device)

    def batch_of(self) -> torch.Tensor:
        return torch.randn(self.batch, self.width, device=self.device)

    def rows(self, num: int) -> torch.Tensor:
        return torch.randn(num, self.width, device=self.device)

    def compute(self, times: int) -> None:
        """Plain work of the device."""
        a = torch.ones(self.width, self.width, device=self.device)
        for _ in range(times):
            a = a @ a * 1e-3


class Samples(Dataset[torch.Tensor]):
    def __init__(self, rank: Rank, delay_s: float) -> None:
        self.rank, self.delay_s = rank, delay_s

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.delay_s:
            time.sleep(self.delay_s)
        return torch.ones(self.rank.width)


class Batches(Dataset[torch.Tensor]):
    def __init__(self, rank: Rank) -> None:
        self.batch = torch.ones(64 * rank.batch, rank.width)

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.batch


def train(
    rank: Rank,
    recorder: Any,
    num_steps: int,
    *,
    bucket_mb: float = 25,
    delay_s: float = 0.0,
    in_step: Callable[[int, torch.Tensor], None] | None = None,
    after_step: Callable[[int], None] | None = None,
    optimizer: Callable[[nn.Module], Any] | None = None,
    depth: int | None = None,
) -> None:
    """DDP with a DataLoader; what the keyword arguments say is planted."""
    model = DistributedDataParallel(rank.model(depth), bucket_cap_mb=bucket_mb)
    update = optimizer(model) if optimizer is not None else torch.optim.SGD(model.parameters(), lr=1e-3)
    loader = iter(DataLoader(Samples(rank, delay_s), batch_size=rank.batch))

    def loss_of(step: int) -> torch.Tensor:
        return squared(model, next(loader).to(rank.device, non_blocking=True))

    steps(rank, recorder, num_steps, model, loss_of, update, in_step=in_step, after_step=after_step)


def squared(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(x).square().mean()
    return loss


def steps(
    rank: Rank,
    recorder: Any,
    num_steps: int,
    model: nn.Module,
    loss_of: Callable[[int], torch.Tensor],
    update: Any = None,
    *,
    in_step: Callable[[int, torch.Tensor], object] | None = None,
    at_end: Callable[[int, torch.Tensor], object] | None = None,
    after_step: Callable[[int], object] | None = None,
) -> None:
    """Train: a loss, its backward pass, an update. Hooks: before the update, at the end, between steps."""
    update = update or torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(num_steps):
        with recorder.step(tokens=rank.batch):
            loss = loss_of(step)
            loss.backward()
            if in_step is not None:
                in_step(step, loss)
            update.step()
            update.zero_grad()
            if at_end is not None:
                at_end(step, loss)
        if after_step is not None:
            after_step(step)


def sharded(rank: Rank, recorder: Any, num: int, prefetch: bool) -> None:
    """Layers whose weights are gathered before they are used; ahead of time, or not."""
    world = dist.get_world_size()
    shards = [torch.randn(rank.width // world, rank.width, device=rank.device) for _ in range(rank.depth)]
    # Enough compute a layer to hide its gather.
    rows = (64 if prefetch or rank.is_cuda else 16) * rank.batch
    for _ in range(num):
        with recorder.step(tokens=rank.batch):
            x = torch.randn(rows, rank.width, device=rank.device)
            whole: list[torch.Tensor] = []
            works: list[Any] = []

            def gather(layer: int, whole: list[torch.Tensor] = whole, works: list[Any] = works) -> None:
                whole.append(torch.empty(rank.width, rank.width, device=rank.device))
                works.append(dist.all_gather_into_tensor(whole[-1], shards[layer], async_op=True))

            if prefetch:
                gather(0)
            for layer in range(rank.depth):
                if not prefetch:
                    gather(layer)
                elif layer + 1 < rank.depth:
                    gather(layer + 1)
                works[layer].wait()
                x = (x @ whole[layer]) * 1e-2
                x = (x @ whole[layer].T) * 1e-2


def plain(rank: Rank, recorder: Any, num: int, rows: int | None = None, **settings: Any) -> None:
    """DDP without a loader; 64 batches' worth of rows a step."""
    model = DistributedDataParallel(rank.model(2), **settings)
    steps(rank, recorder, num, model, lambda step: squared(model, rank.rows(rows or 64 * rank.batch)))


def fitted(
    rank: Rank, recorder: Any, num: int, *, rows: Any = None, before: Any = None, after: Any = None
) -> None:
    """DDP over four layers; hooks before the forward pass and after the step."""
    model = DistributedDataParallel(rank.model())
    update = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

    def loss_of(step: int) -> torch.Tensor:
        if before is not None:
            before(step)
        return squared(model, rank.rows((rows(step) if rows is not None else 32) * rank.batch))

    steps(rank, recorder, num, model, loss_of, update, after_step=after)


def read_in_step(rank: Rank, recorder: Any, num: int, loader: Any, depth: int | None = None) -> None:
    """DDP; a step begins with the next batch."""
    model, batches = DistributedDataParallel(rank.model(depth)), iter(loader)
    steps(rank, recorder, num, model, lambda step: squared(model, next(batches)))


def loaded(rank: Rank, recorder: Any, num: int, loader: DataLoader[Any]) -> None:
    model = DistributedDataParallel(rank.model())
    update = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step, x in enumerate(loader):
        with recorder.step(tokens=rank.batch):
            model(x.to(rank.device)).square().mean().backward()
            update.step()
            update.zero_grad()
        if step + 1 == num:
            break


def varying(rank: Rank, recorder: Any, num: int, times: Any) -> None:
    """times: how many times as long a batch is, by step."""
    model = DistributedDataParallel(rank.model(2))
    update = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(num):
        rows = int(64 * times(step) * rank.batch)
        with recorder.step(tokens=rows):
            model(torch.randn(rows, rank.width)).square().mean().backward()
            update.step()
            update.zero_grad()
