"""
cause: compute
told: ^zero_grad\(\) without set_to_none=False
"""

import torch
from measured import batch, network, steps
from torch.nn.functional import cross_entropy

torch.set_num_threads(1)
model = network(width=2048, layers=2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
rows, labels = batch(16)
for _ in steps(100):
    optimizer.zero_grad(set_to_none=False)
    # -> optimizer.zero_grad()
    cross_entropy(model(rows), labels).backward()
    optimizer.step()
