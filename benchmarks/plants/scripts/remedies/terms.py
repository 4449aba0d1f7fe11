"""
cause: compute
told: make it few operators
"""

import torch
from measured import batch, network, steps
from torch.nn.functional import cross_entropy

torch.set_num_threads(1)
model = network(width=192, layers=2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
rows, labels = batch(512)
for _ in steps(200):
    optimizer.zero_grad()
    scores, loss = model(rows), 0.0
    for row, label in zip(scores, labels, strict=True):
        # -> for row, label in [(scores, labels)]:
        loss = loss + cross_entropy(row, label, reduction="sum") / len(rows)
    loss.backward()
    optimizer.step()
