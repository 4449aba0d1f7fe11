"""
cause: compute
told: leave a sum of squares to the optimizer
"""

import torch
from measured import batch, network, steps
from torch.nn.functional import cross_entropy

torch.set_num_threads(1)
model = network(width=192, layers=40)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
# -> optimizer = torch.optim.SGD(model.parameters(), lr=0.01, weight_decay=1e-4)
rows, labels = batch(64)
for _ in steps(200):
    optimizer.zero_grad()
    loss = cross_entropy(model(rows), labels)
    for parameter in model.parameters():
        loss = loss + 1e-4 * parameter.abs().pow(2).sum()
        # -> pass
    loss.backward()
    optimizer.step()
