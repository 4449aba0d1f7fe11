"""
cause: core_taken|late_rank
told: OMP_NUM_THREADS|or start fewer:.* torch.set_num_threads
ranks: 2
"""

import torch
import torch.distributed as dist
from measured import batch, network, steps
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.set_num_threads(8)
# -> torch.set_num_threads(1)
model = DistributedDataParallel(network(width=768, layers=3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in steps():
    rows, labels = batch(256)
    optimizer.zero_grad()
    cross_entropy(model(rows), labels).backward()
    optimizer.step()
dist.destroy_process_group()
