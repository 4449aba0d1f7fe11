"""
cause: late_rank
told: rank 0 alone (spends this in|does) .*one_rank_works.py:\d+
ranks: 2
"""

import torch
import torch.distributed as dist
from measured import batch, network, steps
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel


def spectrum(model):
    return [torch.linalg.svdvals(value).max().item() for value in model.parameters() if value.dim() == 2]


dist.init_process_group("gloo")
torch.set_num_threads(1)
model = DistributedDataParallel(network(width=160))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in steps():
    rows, labels = batch(512)
    optimizer.zero_grad()
    cross_entropy(model(rows), labels).backward()
    if dist.get_rank() == 0 and step % 1 == 0:
        # -> if dist.get_rank() == 0 and step % 20 == 0:
        spectrum(model)
    optimizer.step()
dist.destroy_process_group()
