"""
cause: no_prefetch|transfer
told: fully_shard each block \(not only the root\)
device: cuda
ranks: 2
"""

import torch
import torch.distributed as dist
from measured import network, place, steps
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

device = place()
model = network(width=4096, layers=12, classes=4096).to(device)
layers = [*model[2:-1:2]]
for first in (0, 4, 8):
    # -> for layer in layers:
    fully_shard(layers[first : first + 4])
    # -> fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
rows, labels = torch.randn(2048, 64, device=device), torch.randint(10, (2048,), device=device)
for _ in steps(200):
    optimizer.zero_grad()
    cross_entropy(model(rows), labels).backward()
    optimizer.step()
dist.destroy_process_group()
