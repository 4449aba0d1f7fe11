"""
cause: compute
told: torch.set_float32_matmul_precision\('high'\) before training
device: cuda
"""

import torch
from measured import network, place, steps
from torch.nn.functional import cross_entropy

torch.set_float32_matmul_precision("highest")
# -> torch.set_float32_matmul_precision("high")
device = place()
model = network(width=4096, layers=6).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
rows, labels = torch.randn(2048, 64, device=device), torch.randint(10, (2048,), device=device)
for _ in steps(120):
    optimizer.zero_grad()
    cross_entropy(model(rows), labels).backward()
    optimizer.step()
