"""
cause: transfer|small_messages
told: send them every few steps|stack the values
ranks: 2
"""

import torch
import torch.distributed as dist
from measured import batch, network, steps
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.set_num_threads(1)
model = DistributedDataParallel(network(width=128))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
state = torch.zeros(3_000_000)
for step in steps():
    rows, labels = batch(64)
    optimizer.zero_grad()
    cross_entropy(model(rows), labels).backward()
    optimizer.step()
    if step % 1 == 0:
        # -> if step % 20 == 0:
        dist.broadcast(state, 0)
dist.destroy_process_group()
