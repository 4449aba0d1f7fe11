"""
cause: compute
told: ^torch.set_num_threads.*OMP_NUM_THREADS
"""

import torch
from measured import batch, network, steps
from torch.nn.functional import cross_entropy

torch.set_num_threads(1)
# -> import os
# -> torch.set_num_threads(len(os.sched_getaffinity(0)))
model = network(width=1024)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in steps():
    rows, labels = batch()
    optimizer.zero_grad()
    cross_entropy(model(rows), labels).backward()
    optimizer.step()
