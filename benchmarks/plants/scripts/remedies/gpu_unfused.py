"""
cause: optimizer
told: fused=True where the optimizer has it
device: cuda
"""

import torch
from measured import place, steps
from torch import nn
from torch.nn.functional import cross_entropy

device = place()
model = nn.Sequential(nn.Linear(64, 256), *(nn.LayerNorm(256) for _ in range(200)), nn.Linear(256, 10)).to(
    device
)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.001, foreach=True)
# -> optimizer = torch.optim.AdamW(model.parameters(), lr=0.001, fused=True)
rows, labels = torch.randn(64, 64, device=device), torch.randint(10, (64,), device=device)
for _ in steps(300):
    optimizer.zero_grad()
    cross_entropy(model(rows), labels).backward()
    optimizer.step()
