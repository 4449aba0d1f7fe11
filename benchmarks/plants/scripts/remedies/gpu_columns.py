"""
cause: compute
told: let cuDNN compute convolutions
device: cuda
"""

import torch
from measured import place, steps
from torch import nn
from torch.nn.functional import cross_entropy

device = place()
torch.backends.cudnn.enabled = False
# ->


def block(channels):
    return nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1), nn.ReLU())


model = nn.Sequential(
    nn.Conv2d(8, 256, 3, padding=1), *(block(256) for _ in range(8)),
    nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10),
).to(device, memory_format=torch.channels_last)  # fmt: skip
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
images = torch.randn(64, 8, 28, 28, device=device).to(memory_format=torch.channels_last)
labels = torch.randint(10, (64,), device=device)
for _ in steps(120):
    optimizer.zero_grad()
    cross_entropy(model(images), labels).backward()
    optimizer.step()
