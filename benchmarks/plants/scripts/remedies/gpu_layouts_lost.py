"""
cause: compute
told: keep one layout from layer to layer. .* gpu_layouts_lost.py:\d+
device: cuda
"""

import torch
from measured import steps
from torch import nn


class Gate(nn.Module):
    """Weights channels by their means."""

    def __init__(self, channels):
        super().__init__()
        self.down, self.up = nn.Linear(channels, channels // 8), nn.Linear(channels // 8, channels)

    def forward(self, x):
        rows = x.reshape(x.shape[0], -1)
        # -> means = x.mean((2, 3))
        means = rows.view(*x.shape[:2], -1).mean(-1)
        # ->
        gate = torch.sigmoid(self.up(torch.relu(self.down(means))))
        return (rows.view(*x.shape[:2], -1) * gate.unsqueeze(-1)).view(x.shape)
        # -> return x * gate[:, :, None, None]


def block(num):
    first = nn.Conv2d(num, num, 3, padding=1, bias=False), nn.BatchNorm2d(num), nn.ReLU(), Gate(num)
    return *first, nn.Conv2d(num, num, 1, bias=False), nn.BatchNorm2d(num), nn.ReLU()


layers = [layer for _ in range(5) for layer in block(256)]
ends = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 100)
model = nn.Sequential(nn.Conv2d(3, 256, 4, 4), *layers, *ends).to("cuda", memory_format=torch.channels_last)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
images = torch.randn(64, 3, 224, 224, device="cuda").to(memory_format=torch.channels_last)
labels = torch.randint(100, (64,), device="cuda")
for _ in steps(80):
    optimizer.zero_grad()
    with torch.autocast("cuda", torch.bfloat16):
        loss = nn.functional.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
