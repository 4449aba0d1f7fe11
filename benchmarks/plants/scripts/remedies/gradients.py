"""
cause: transfer
told: no_sync\(\) with more micro-batches
ranks: 2
"""

from contextlib import nullcontext  # noqa: F401

import torch
import torch.distributed as dist
from measured import batch, network, steps
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.set_num_threads(1)
model = DistributedDataParallel(network(width=1536, layers=3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in steps(40):
    rows, labels = batch(16)
    cross_entropy(model(rows), labels).backward()
    # -> with nullcontext() if step % 4 == 3 else model.no_sync():
    # ->     cross_entropy(model(rows), labels).backward()
    if step % 1 == 0:
        # -> if step % 4 == 3:
        optimizer.step()
        optimizer.zero_grad()
dist.destroy_process_group()
