"""
cause: transfer
told: or fewer steps that communicate
ranks: 2
"""

import torch
import torch.distributed as dist
from measured import batch, network, steps
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.set_num_threads(1)
model = DistributedDataParallel(network(width=128))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
own, whole = torch.randn(2_000_000), torch.empty(4_000_000)
for step in steps(100):
    rows, labels = batch(64)
    optimizer.zero_grad()
    cross_entropy(model(rows), labels).backward()
    if step % 1 == 0:
        # -> if step % 25 == 0:
        dist.all_gather_into_tensor(whole, own)
    optimizer.step()
dist.destroy_process_group()
