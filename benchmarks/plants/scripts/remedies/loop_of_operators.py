"""
cause: compute
told: "work on all at once: stack what the loop"
"""

import torch
from measured import steps
from torch import nn

torch.set_num_threads(1)


class Rows(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Parameter(torch.randn(32, 32) / 6)

    def forward(self, x):
        return torch.stack([torch.tanh(row @ self.inner) for row in x])
        # -> return torch.tanh(x @ self.inner)


model = nn.Sequential(nn.Linear(32, 32), Rows(), nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in steps(200):
    optimizer.zero_grad()
    model(torch.randn(256, 32)).square().mean().backward()
    optimizer.step()
