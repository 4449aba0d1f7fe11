"""
cause: optimizer
told: has it on a CPU too
"""

import torch
from measured import batch, network, steps
from torch.nn.functional import cross_entropy

torch.set_num_threads(1)
model = network(width=32, layers=80)
optimizer = torch.optim.Adam(model.parameters())
# -> optimizer = torch.optim.Adam(model.parameters(), fused=True)
for _ in steps(150):
    rows, labels = batch(16)
    optimizer.zero_grad()
    cross_entropy(model(rows), labels).backward()
    optimizer.step()
