"""
cause: optimizer
told: fused=True where the optimizer has it
device: cuda
"""

import torch
from measured import place, steps
from torch import nn

device = place()


class Offsets(nn.Module):
    """Many small weights, and few operators."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ParameterList(torch.randn(64) for _ in range(800))
        self.outer = nn.Linear(64, 4096)

    def forward(self, rows):
        return self.outer(rows + torch.stack(list(self.parts)).mean(dim=0))


model = Offsets().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.001, foreach=True)
# -> optimizer = torch.optim.AdamW(model.parameters(), lr=0.001, fused=True)
rows = torch.randn(256, 64, device=device)
for _ in steps(300):
    optimizer.zero_grad()
    model(rows).square().mean().backward()
    optimizer.step()
