"""
cause: compute
told: torch.nn.functional.conv2d
"""

import torch
from measured import steps
from torch import nn
from torch.nn.functional import conv2d, cross_entropy, unfold

torch.set_num_threads(1)
use = conv2d, unfold


class Scaled(nn.Module):
    """A convolution whose weights have one length."""

    def __init__(self, inner, outer):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outer, inner * 9))

    def forward(self, x):
        weight = nn.functional.normalize(self.weight)
        seen = (weight @ unfold(x, 3, padding=1)).view(len(x), -1, *x.shape[2:])
        # -> seen = conv2d(x, weight.view(-1, x.shape[1], 3, 3), padding=1)
        return seen.relu()


model = nn.Sequential(Scaled(3, 16), Scaled(16, 16), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in steps():
    images, labels = torch.randn(16, 3, 24, 24), torch.randint(10, (16,))
    optimizer.zero_grad()
    cross_entropy(model(images), labels).backward()
    optimizer.step()
