"""
cause: compute
told: make \S+ a product of small primes, .* at .*transforms.py:\d+
device: cuda
"""

import torch
from measured import steps
from torch import nn

device = torch.device("cuda")
LENGTH = 20_799
# -> LENGTH = 21_600


class Mixer(nn.Module):
    """Filters that are as long as a signal, and a layer beside them."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 64), nn.Linear(64, 8)
        self.filters = nn.Parameter(torch.randn(64, LENGTH) / LENGTH)

    def forward(self, x):
        y = self.up(x).transpose(1, 2)
        y = torch.fft.irfft(torch.fft.rfft(y) * torch.fft.rfft(self.filters), n=LENGTH)
        return self.down(torch.relu(y).transpose(1, 2))


model = Mixer().to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in steps(80):
    x = torch.randn(32, LENGTH, 8, device=device)
    optimizer.zero_grad()
    (model(x) - x).square().mean().backward()
    optimizer.step()
