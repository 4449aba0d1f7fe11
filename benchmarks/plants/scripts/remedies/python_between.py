"""
cause: program_code
told: in place of Python's loops and numpy|draw all numbers in one call
"""

import random

import torch
from measured import network, steps
from torch import nn

torch.set_num_threads(1)


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = network(width=256, layers=2)

    def forward(self, x):
        noise = torch.tensor([random.gauss(0, 1) for _ in range(16_384)])
        # -> noise = torch.randn(16_384)
        return self.layers(x + 0.1 * noise.view(-1, x.shape[1])[: len(x)])


model = Noisy()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in steps():
    optimizer.zero_grad()
    model(torch.randn(256, 64)).square().mean().backward()
    optimizer.step()
