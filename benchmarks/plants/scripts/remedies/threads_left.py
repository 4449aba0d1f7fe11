"""
cause: compute
told: torch.set_num_threads\(\d+\), or OMP_NUM_THREADS
"""

import torch
from measured import batch, network, steps
from torch.nn.functional import cross_entropy

threads = 1
# -> threads = 2
torch.set_num_threads(threads)
model = network(width=1024)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in steps(60):
    rows, labels = batch(512)
    optimizer.zero_grad()
    cross_entropy(model(rows), labels).backward()
    optimizer.step()
