"""
cause: compute
told: torch.set_num_threads\(\d+\), or OMP_NUM_THREADS
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"
# -> os.environ["OMP_NUM_THREADS"] = "2"

import torch
from measured import batch, network, steps
from torch.nn.functional import cross_entropy

model = network(width=1024)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in steps(60):
    rows, labels = batch(512)
    optimizer.zero_grad()
    cross_entropy(model(rows), labels).backward()
    optimizer.step()
