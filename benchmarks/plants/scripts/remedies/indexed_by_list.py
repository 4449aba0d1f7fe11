"""
cause: program_code
told: indexes with a list
"""

import random

import torch
from measured import network, steps
from torch.nn.functional import cross_entropy

torch.set_num_threads(1)
model = network(width=32, layers=1, features=8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
samples, classes = torch.randn(200_000, 8), torch.randint(10, (200_000,))
order = random.sample(range(200_000), 200_000)
# -> order = torch.tensor(random.sample(range(200_000), 200_000))
for step in steps(200):
    chosen = order[step % 24 * 8192 : (step % 24 + 1) * 8192]
    rows, labels = samples[chosen], classes[chosen]
    optimizer.zero_grad()
    cross_entropy(model(rows), labels).backward()
    optimizer.step()
