"""
cause: transfer|small_messages
told: each bucket is reduced 6 times between two optimizer steps. no_sync\(\)
ranks: 2
"""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from measured import batch, network, steps
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.set_num_threads(1)
model = DistributedDataParallel(network(width=1024, layers=3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in steps():
    optimizer.zero_grad()
    for micro in range(6):  # noqa: B007
        rows, labels = batch(16)
        with nullcontext():
            # -> with model.no_sync() if micro < 5 else nullcontext():
            cross_entropy(model(rows), labels).backward()
    optimizer.step()
dist.destroy_process_group()
