"""
cause: small_messages
told: flatten the tensors into one before the call .* fully_shard of whole blocks
ranks: 2
"""

import torch
import torch.distributed as dist
from measured import batch, network, steps
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

dist.init_process_group("gloo")
torch.set_num_threads(1)
model = network(width=64, layers=6)
for layer in model[2:-1:2]:
    # ->
    fully_shard(layer)
    # ->
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in steps(100):
    rows, labels = batch(16)
    optimizer.zero_grad()
    cross_entropy(model(rows), labels).backward()
    optimizer.step()
dist.destroy_process_group()
