"""
cause: compute
told: make \S+ a product of small primes, .* at .*transforms.py:\d+
"""

import torch
from measured import steps
from torch import nn

torch.set_num_threads(1)
LENGTH = 20_799
# -> LENGTH = 21_600


class Mixer(nn.Module):
    """Filters that are as long as a signal, and a layer beside them."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 16), nn.Linear(16, 4)
        self.filters = nn.Parameter(torch.randn(16, LENGTH) / LENGTH)

    def forward(self, x):
        y = self.up(x).transpose(1, 2)
        y = torch.fft.irfft(torch.fft.rfft(y) * torch.fft.rfft(self.filters), n=LENGTH)
        return self.down(torch.relu(y).transpose(1, 2))


model = Mixer()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in steps(80):
    x = torch.randn(4, LENGTH, 4)
    optimizer.zero_grad()
    (model(x) - x).square().mean().backward()
    optimizer.step()
