"""
cause: transfer|small_messages
told: remove the barriers
ranks: 2
"""

import torch
import torch.distributed as dist
from measured import batch, network, steps
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.set_num_threads(1)
model = DistributedDataParallel(network(width=32, layers=2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in steps(300):
    rows, labels = batch(16)
    for _ in range(5):
        # ->
        dist.barrier()
        # ->
    optimizer.zero_grad()
    cross_entropy(model(rows), labels).backward()
    optimizer.step()
dist.destroy_process_group()
