"""
cause: small_messages
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
model = DistributedDataParallel(network(width=128))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in steps(150):
    rows, labels = batch(64)
    optimizer.zero_grad()
    cross_entropy(model(rows), labels).backward()
    for _ in range(12):
        # ->
        dist.barrier()
        # ->
    optimizer.step()
dist.destroy_process_group()
