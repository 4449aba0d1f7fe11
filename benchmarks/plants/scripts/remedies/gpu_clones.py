"""
cause: copy
told: leave out copies between tensors of the device
device: cuda
"""

import torch
from measured import place, steps
from torch import nn

device = place()


class Mix(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4096))

    def forward(self, x):
        kept = x.clone()
        # -> kept = x
        return torch.addcmul(kept, kept, self.weight, value=0.01)


model = nn.Sequential(*(Mix() for _ in range(8))).to(device, torch.bfloat16)
optimizer = torch.optim.SGD(model.parameters(), lr=0.001, fused=True)
x = torch.randn(65536, 4096, device=device, dtype=torch.bfloat16)
for _ in steps(200):
    optimizer.zero_grad()
    model(x).mean().backward()
    optimizer.step()
