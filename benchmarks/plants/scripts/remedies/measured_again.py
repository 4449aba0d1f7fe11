"""
cause: compute
told: take what it finds from the outputs
"""

import torch
from measured import batch, network, steps
from torch.nn.functional import cross_entropy

torch.set_num_threads(1)
model, right = network(), []
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)


def accuracy(rows, labels):
    with torch.no_grad():
        return (model(rows).argmax(1) == labels).float().mean()


for _ in steps():
    rows, labels = batch()
    optimizer.zero_grad()
    found = model(rows)
    cross_entropy(found, labels).backward()
    optimizer.step()
    right.append(accuracy(rows, labels))
    # -> right.append((found.detach().argmax(1) == labels).float().mean())
