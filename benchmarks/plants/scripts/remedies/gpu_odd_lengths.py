"""
cause: compute
told: make the dimensions of what is multiplied multiples of 64
device: cuda
"""

import torch
from measured import place, steps
from torch import nn

device = place()
LENGTH = 2047
# -> LENGTH = 2048


class Mixer(nn.Module):
    """What it reads on the host cannot be known without data."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(512, 512)

    def forward(self, x):
        scores = torch.bmm(self.inner(x), x.transpose(1, 2)) / LENGTH
        return torch.bmm(scores, x) if x[0, 0, 0].item() < 9 else x


model = nn.Sequential(*(Mixer() for _ in range(4))).to(device, torch.bfloat16)
optimizer = torch.optim.SGD(model.parameters(), lr=0.001, fused=True)
x = torch.randn(32, LENGTH, 512, device=device, dtype=torch.bfloat16)
for _ in steps(120):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
