"""
cause: compute
told: keep one layout from layer to layer
"""

import torch
from measured import steps
from torch import nn
from torch.nn.functional import cross_entropy

torch.set_num_threads(1)


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(64)

    def forward(self, images):
        seen = self.norm(images.permute(0, 2, 3, 1).contiguous())
        # -> seen = self.norm(images.permute(0, 2, 3, 1))
        return seen.permute(0, 3, 1, 2).contiguous()
        # -> return seen.permute(0, 3, 1, 2)


def block():
    return nn.Conv2d(64, 64, 3, padding=1, groups=64), Norm(), nn.Conv2d(64, 64, 1), nn.GELU()


layers = [layer for _ in range(4) for layer in block()]
ends = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)
model = nn.Sequential(nn.Conv2d(3, 64, 4, 4), *layers, *ends)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in steps():
    images, labels = torch.randn(2, 3, 128, 128), torch.randint(10, (2,))
    optimizer.zero_grad()
    cross_entropy(model(images), labels).backward()
    optimizer.step()
