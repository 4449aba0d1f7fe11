"""
cause: program_code
told: in place of Python's loops and numpy
"""

import numpy
import torch
from measured import network, steps
from torch import nn

torch.set_num_threads(1)


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.random = network(width=256, layers=2), numpy.random.default_rng(0)

    def forward(self, x):
        noise = torch.from_numpy(self.random.standard_normal(x.shape))
        # -> noise = torch.randn(x.shape)
        return self.layers(x + 0.1 * noise.float())


model = Noisy()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in steps():
    optimizer.zero_grad()
    model(torch.randn(2048, 64)).square().mean().backward()
    optimizer.step()
