"""
cause: imbalance|late_rank
told: give all ranks batches of like size
device: cuda
ranks: 2
"""

import random

import torch
import torch.distributed as dist
from measured import network, place, steps
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

device = place()
model = DistributedDataParallel(network(width=2048, layers=6).to(device), gradient_as_bucket_view=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
lengths = random.Random(dist.get_rank())
# -> lengths = random.Random(0)
for _ in steps(250):
    rows = torch.randn(lengths.choice([2048, 6144, 16384]), 64, device=device)
    labels = torch.randint(10, (len(rows),), device=device)
    optimizer.zero_grad()
    cross_entropy(model(rows), labels).backward()
    optimizer.step()
dist.destroy_process_group()
