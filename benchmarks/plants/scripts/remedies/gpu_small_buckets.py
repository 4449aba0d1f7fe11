"""
cause: small_units|small_messages
told: leave (bucket_cap_mb of DistributedDataParallel|it) at its default of 25
device: cuda
ranks: 2
"""

import torch
import torch.distributed as dist
from measured import network, place, steps
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

device = place()
cap_mb = 0.1
# -> cap_mb = 25
model = DistributedDataParallel(network(width=256, layers=60).to(device), bucket_cap_mb=cap_mb)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
rows, labels = torch.randn(512, 64, device=device), torch.randint(10, (512,), device=device)
for _ in steps(300):
    optimizer.zero_grad()
    cross_entropy(model(rows), labels).backward()
    optimizer.step()
dist.destroy_process_group()
