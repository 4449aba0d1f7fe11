"""
cause: compute
told: keep one layout from layer to layer. .* transposing at \S+, gpu_layouts.py:\d+
device: cuda
"""

import torch
from measured import steps
from torch import nn

device = torch.device("cuda")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(1024), nn.Linear(1024, 2048), nn.Linear(2048, 1024)

    def forward(self, x):
        y = x.transpose(1, 2).contiguous()
        # ->
        y = self.norm(y.transpose(1, 2).contiguous())
        # -> y = self.norm(x)
        return x + self.down(torch.relu(self.up(y)))


model = nn.Sequential(*(Block() for _ in range(12))).to(device, torch.bfloat16)
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
x = torch.randn(16, 1024, 1024, device=device, dtype=torch.bfloat16)
for _ in steps(80):
    optimizer.zero_grad()
    model(x).float().square().mean().backward()
    optimizer.step()
