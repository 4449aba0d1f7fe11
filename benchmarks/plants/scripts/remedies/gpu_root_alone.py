"""
cause: transfer|no_prefetch
told: units of several blocks, made before that of the model
device: cuda
ranks: 2
"""

import torch
import torch.distributed as dist
from measured import network, place, steps
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

device = place()
model = network(width=4096, layers=12).to(device)
layers = [*model[2:-1:2]]
each = 0  # layers in a unit
# -> each = 2
for first in range(0, 12, each or 12):
    if each:
        fully_shard(layers[first : first + each])
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
rows, labels = torch.randn(2048, 64, device=device), torch.randint(10, (2048,), device=device)
for _ in steps(200):
    optimizer.zero_grad()
    cross_entropy(model(rows), labels).backward()
    optimizer.step()
dist.destroy_process_group()
