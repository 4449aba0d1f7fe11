"""
cause: compute|launch_bound
told: make one module of those that it calls one by one
device: cuda
"""

import torch
from measured import place, steps
from torch import nn
from torch.nn.functional import mse_loss

device = place()


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(64, 256)
        self.heads = nn.ModuleList(nn.Linear(256, 1) for _ in range(300))
        # -> self.heads = nn.Linear(256, 300)

    def forward(self, rows):
        hidden = torch.relu(self.trunk(rows))
        return torch.cat([head(hidden) for head in self.heads], dim=1)
        # -> return self.heads(hidden)


model = Heads().to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
rows, aims = torch.randn(512, 64, device=device), torch.randn(512, 300, device=device)
for _ in steps(160):
    optimizer.zero_grad()
    mse_loss(model(rows), aims).backward()
    optimizer.step()
