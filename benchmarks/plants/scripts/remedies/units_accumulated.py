"""
cause: transfer
told: set_requires_gradient_sync\(False\)
ranks: 2
"""

import torch
import torch.distributed as dist
from measured import batch, network, steps
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

dist.init_process_group("gloo")
torch.set_num_threads(1)
model = network(width=512, layers=8)
for at in range(2, 16, 4):
    fully_shard([model[at], model[at + 2]], reshard_after_forward=False)
fully_shard(model, reshard_after_forward=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in steps(60):
    optimizer.zero_grad()
    for micro in range(4):
        model.set_requires_gradient_sync(micro >= 0)
        # -> model.set_requires_gradient_sync(micro == 3)
        rows, labels = batch(16)
        cross_entropy(model(rows), labels).backward()
    optimizer.step()
dist.destroy_process_group()
