"""
cause: small_messages|transfer
told: leave these calls out. the program has DistributedDataParallel
ranks: 2
"""

import torch
import torch.distributed as dist
from measured import batch, network, steps
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.set_num_threads(1)
model = DistributedDataParallel(network(width=64, layers=24))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in steps(150):
    rows, labels = batch(16)
    optimizer.zero_grad()
    cross_entropy(model(rows), labels).backward()
    for value in model.parameters():
        # ->
        dist.all_reduce(value.grad)
        # ->
    optimizer.step()
dist.destroy_process_group()
