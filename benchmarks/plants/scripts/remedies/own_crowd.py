"""
cause: core_taken
told: or let the ranks use more cores than they are bound to
"""

import os

import torch
from measured import batch, network, steps
from torch.nn.functional import cross_entropy

os.sched_setaffinity(0, list(os.sched_getaffinity(0))[:1])
threads = 4
# -> threads = 1
torch.set_num_threads(threads)
model = network(width=512)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in steps():
    rows, labels = batch()
    optimizer.zero_grad()
    cross_entropy(model(rows), labels).backward()
    optimizer.step()
