"""
cause: compute
told: leave activation checkpointing off.*computed_again.py:\d+
"""

import torch
from measured import batch, network, steps
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

torch.set_num_threads(1)


class Frugal(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(network(width=512, layers=6, classes=512), nn.Linear(512, 10))

    def forward(self, x):
        for layer in self.inner:
            x = checkpoint(layer, x, use_reentrant=False)
            # -> x = layer(x)
        return x


model = Frugal()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in steps():
    rows, labels = batch(256)
    optimizer.zero_grad()
    cross_entropy(model(rows), labels).backward()
    optimizer.step()
