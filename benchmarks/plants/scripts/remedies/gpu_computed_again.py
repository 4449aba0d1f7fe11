"""
cause: compute
told: leave activation checkpointing off.*gpu_computed_again.py:\d+
device: cuda
"""

import torch
from measured import network, steps
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint


class Frugal(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(network(width=4096, layers=8, classes=4096), nn.Linear(4096, 10))

    def forward(self, x):
        for layer in self.inner:
            x = checkpoint(layer, x, use_reentrant=False)
            # -> x = layer(x)
        return x


device = torch.device("cuda")
model = Frugal().to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
rows, labels = torch.randn(8192, 64, device=device), torch.randint(10, (8192,), device=device)
for _ in steps(80):
    optimizer.zero_grad()
    with torch.autocast("cuda", torch.bfloat16):
        loss = cross_entropy(model(rows), labels)
    loss.backward()
    optimizer.step()
