"""
cause: small_units|no_prefetch|transfer
told: give several of them to one unit|in force. fewer, larger units
ranks: 2
"""

import torch
import torch.distributed as dist
from measured import batch, network, steps
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

dist.init_process_group("gloo")
torch.set_num_threads(1)
model = torch.nn.Sequential(*(network(width=64, layers=3, classes=64) for _ in range(12)))
for block in model:
    # ->
    fully_shard(block, reshard_after_forward=False)
    # ->
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in steps(100):
    rows, labels = batch(16, classes=64)
    optimizer.zero_grad()
    cross_entropy(model(rows), labels).backward()
    optimizer.step()
dist.destroy_process_group()
