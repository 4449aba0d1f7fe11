"""
cause: program_code|between_steps
told: draw all numbers in one call
"""

import random

import torch
from measured import batch, network, steps
from torch.nn.functional import cross_entropy

torch.set_num_threads(1)
model = network()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in steps():
    rows, labels = batch()
    noise = torch.tensor([random.gauss(0, 1) for _ in range(16_384)])
    # -> noise = torch.randn(16_384)
    rows = rows + noise.view(256, 64)
    optimizer.zero_grad()
    cross_entropy(model(rows), labels).backward()
    optimizer.step()
