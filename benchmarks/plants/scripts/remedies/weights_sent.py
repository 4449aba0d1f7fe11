"""
cause: small_messages|transfer
told: leave these broadcasts out
ranks: 2
"""

import torch
import torch.distributed as dist
from measured import batch, network, steps
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
dist.init_process_group("gloo")

model = DistributedDataParallel(network(width=512, layers=5))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in steps():
    rows, labels = batch(64)
    optimizer.zero_grad()
    cross_entropy(model(rows), labels).backward()
    optimizer.step()
    for parameter in model.parameters():
        # ->
        dist.broadcast(parameter.data, 0)
        # ->
dist.destroy_process_group()
