"""
cause: compute
told: model.to\(memory_format=torch.channels_last\)
device: cuda
"""

import torch
from measured import place, steps
from torch import nn
from torch.nn.functional import cross_entropy

device = place()


def block(channels):
    return nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU())


model = nn.Sequential(
    nn.Conv2d(3, 256, 3, padding=1), *(block(256) for _ in range(12)),
    nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10),
).to(device)  # fmt: skip
# -> ).to(device, memory_format=torch.channels_last)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
images, labels = torch.randn(128, 3, 28, 28, device=device), torch.randint(10, (128,), device=device)
# -> images = torch.randn(128, 3, 28, 28, device=device).to(memory_format=torch.channels_last)
# -> labels = torch.randint(10, (128,), device=device)
for _ in steps(160):
    optimizer.zero_grad()
    with torch.autocast("cuda", torch.bfloat16):
        loss = cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
