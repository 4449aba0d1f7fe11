"""
cause: launch_bound|optimizer
told: ^torch.compile\(model\)
device: cuda
"""

import torch
from measured import network, steps
from torch.nn.functional import cross_entropy

device = torch.device("cuda")
model = network(width=64, layers=24).to(device)
# -> model = torch.compile(network(width=64, layers=24).to(device), mode="reduce-overhead")
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
rows, labels = torch.randn(64, 64, device=device), torch.randint(10, (64,), device=device)
for _ in steps(400):
    optimizer.zero_grad()
    cross_entropy(model(rows), labels).backward()
    optimizer.step()
