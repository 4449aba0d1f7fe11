"""
cause: program_code
told: work on all tensors in one call|over many tensors at once|what only watches
"""

import torch
from measured import batch, network, steps
from torch.nn.functional import cross_entropy

torch.set_num_threads(1)
model = network(width=96, layers=60)
averaged = [value.detach().clone() for value in model.parameters()]
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)


def update(weights):
    for mean, value in zip(averaged, weights, strict=True):
        mean.copy_(0.99 * mean + 0.01 * value)


for step in steps(150):
    rows, labels = batch(16)
    optimizer.zero_grad()
    cross_entropy(model(rows), labels).backward()
    optimizer.step()
    if step % 1 == 0:
        # -> if step % 20 == 0:
        with torch.no_grad():
            update(list(model.parameters()))
