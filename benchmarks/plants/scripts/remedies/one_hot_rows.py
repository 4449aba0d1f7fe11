"""
cause: compute
told: instead of one_hot
"""

import torch
from measured import network, steps
from torch import nn
from torch.nn import functional as F

torch.set_num_threads(1)


class Items(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.layers = nn.Parameter(torch.randn(4000, 64)), network(width=128, layers=2)

    def forward(self, ids):
        return self.layers(F.one_hot(ids, 4000).float() @ self.weight)
        # -> return self.layers(F.embedding(ids, self.weight))


model = Items()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in steps():
    ids, labels = torch.randint(4000, (512,)), torch.randint(10, (512,))
    optimizer.zero_grad()
    F.cross_entropy(model(ids), labels).backward()
    optimizer.step()
