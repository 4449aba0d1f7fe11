"""
cause: compute
told: leave requires_grad_\(\)
"""

import torch
from measured import steps
from torch import nn
from torch.nn.functional import cross_entropy

torch.set_num_threads(1)
model = nn.Sequential(
    *(nn.Conv2d(3, 32, 7, padding=3), nn.ReLU(), nn.MaxPool2d(4), nn.Conv2d(32, 32, 3, padding=1)),
    *(nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in steps():
    images = torch.randn(8, 3, 64, 64)
    images.requires_grad_()
    # -> pass
    optimizer.zero_grad()
    cross_entropy(model(images), torch.randint(10, (8,))).backward()
    optimizer.step()
