"""A loop of two gloo ranks with DDP, and a collective of its own that it does not wait for in time."""

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from aorta.attach.instrument import instrument
from aorta.check.watch import HazardWatch


def checked_loop(folder: str) -> None:
    model = nn.parallel.DistributedDataParallel(nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    total = torch.ones(1 << 16)
    recorder = instrument(Path(folder))
    recorder.companions.add(HazardWatch(every=100))
    with recorder:
        for number in range(9):
            with recorder.step(global_step=number):
                model(torch.ones(4, 64)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                total.fill_(dist.get_rank() + 1)
                work = dist.all_reduce(total, async_op=True)
                total.mul_(0.5)
                work.wait()
