"""
cause: compute
told: compute each row where it counts alone
"""

import torch
from measured import network, steps
from torch import nn
from torch.nn.functional import mse_loss, one_hot

torch.set_num_threads(1)


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(64, 4)
        self.experts = nn.ModuleList(network(width=256, layers=1, classes=64) for _ in range(4))

    def forward(self, x):
        value, chosen = self.gate(x).softmax(-1).max(-1)
        done = torch.zeros_like(x)
        weights = one_hot(chosen, 4) * value[:, None]
        for place, expert in enumerate(self.experts):
            done = done + expert(x) * weights[:, place : place + 1]
            # -> rows = (chosen == place).nonzero().squeeze(1)
            # -> done = done.index_add(0, rows, expert(x[rows]) * value[rows, None])
        return done


model = Mixture()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in steps():
    rows = torch.randn(512, 64)
    optimizer.zero_grad()
    mse_loss(model(rows), rows).backward()
    optimizer.step()
