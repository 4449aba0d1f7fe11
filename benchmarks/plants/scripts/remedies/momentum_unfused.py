"""
cause: optimizer
told: fused=True where the optimizer has it
"""

import torch
from measured import batch, network, steps
from torch.nn.functional import cross_entropy

torch.set_num_threads(1)
model = network(width=32, layers=150)
optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9, nesterov=True)
# -> optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9, nesterov=True, fused=True)
for _ in steps(150):
    rows, labels = batch(16)
    optimizer.zero_grad()
    cross_entropy(model(rows), labels).backward()
    optimizer.step()
