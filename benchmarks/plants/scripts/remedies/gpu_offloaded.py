"""
cause: optimizer
told: leave \w+ out at gpu_offloaded.py:\d+
device: cuda
ranks: 2
"""

import torch
import torch.distributed as dist
from measured import network, place, steps
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.nn.functional import cross_entropy

device = place()
model = network(width=2048, layers=12, classes=2048).to(device)
policy = {"offload_policy": CPUOffloadPolicy()}
# -> policy = {}
for layer in model[2:-1:2]:
    fully_shard(layer, **policy)
fully_shard(model, **policy)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
rows, labels = torch.randn(2048, 64, device=device), torch.randint(10, (2048,), device=device)
for _ in steps(100):
    optimizer.zero_grad()
    cross_entropy(model(rows), labels).backward()
    optimizer.step()
dist.destroy_process_group()
