"""
cause: copy
told: what the host must have need not come in every step
device: cuda
"""

import torch
from measured import network, place, steps
from torch.nn.functional import cross_entropy

device = place()
model = network(width=2048, layers=4, classes=8192).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
rows, labels = torch.randn(8192, 64, device=device), torch.randint(8192, (8192,), device=device)
kept = torch.empty(8192, 8192).pin_memory()
for step in steps(300):
    optimizer.zero_grad()
    scores = model(rows)
    cross_entropy(scores, labels).backward()
    optimizer.step()
    if step % 1 == 0:
        # -> if step % 50 == 0:
        kept.copy_(scores.detach(), non_blocking=True)
