"""
cause: program_code
told: ^torch.backends.cudnn.benchmark = False
device: cuda
"""

import random

import torch
from measured import steps
from torch import nn
from torch.nn.functional import cross_entropy

torch.backends.cudnn.benchmark = True
# -> torch.backends.cudnn.benchmark = False
device = torch.device("cuda")
widths = [3, 32, 64, 64]
layers = [
    one
    for few, more in zip(widths, widths[1:], strict=False)
    for one in (nn.Conv2d(few, more, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
]
model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
for _ in steps(120):
    height, width = random.randrange(128, 320), random.randrange(128, 320)
    images = torch.randn(16, 3, height, width, device=device)
    optimizer.zero_grad()
    cross_entropy(model(images), torch.randint(10, (16,), device=device)).backward()
    optimizer.step()
