"""
cause: small_messages|transfer
told: send once what does not change, and the rest
ranks: 2
"""

import torch
import torch.distributed as dist
from measured import batch, network, steps
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.set_num_threads(1)
model = DistributedDataParallel(network(width=64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
settings = [torch.zeros(16) for _ in range(40)]
# -> settings = [torch.zeros(40, 16)]
for _ in steps(150):
    for value in settings:
        dist.broadcast(value, 0)
    rows, labels = batch(16)
    optimizer.zero_grad()
    cross_entropy(model(rows), labels).backward()
    optimizer.step()
dist.destroy_process_group()
