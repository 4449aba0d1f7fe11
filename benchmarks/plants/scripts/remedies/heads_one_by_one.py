"""
cause: compute
told: make one module of those
"""

import torch
from measured import batch, network, steps
from torch import nn
from torch.nn.functional import mse_loss

torch.set_num_threads(1)


class Tasks(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = network(width=128, layers=2, classes=32)
        self.heads = nn.ModuleList(nn.Sequential(nn.Linear(32, 8), nn.ReLU()) for _ in range(64))
        # -> self.heads = nn.Sequential(nn.Linear(32, 8 * 64), nn.ReLU())

    def forward(self, x):
        h = self.trunk(x)
        return torch.cat([head(h) for head in self.heads], 1)
        # -> return self.heads(h)


model, (x, _) = Tasks(), batch()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, foreach=True)
wanted = torch.randn(len(x), 8 * 64)
for _ in steps():
    optimizer.zero_grad()
    mse_loss(model(x), wanted).backward()
    optimizer.step()
