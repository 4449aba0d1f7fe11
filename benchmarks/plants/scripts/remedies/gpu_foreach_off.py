"""
cause: optimizer
told: foreach=False at gpu_foreach_off.py:\d+. leave it out, or set fused=True
device: cuda
"""

import torch
from measured import network, steps
from torch.nn.functional import cross_entropy

device = torch.device("cuda")
model = network(width=256, layers=100).to(device)
optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
# -> optimizer = torch.optim.AdamW(model.parameters(), fused=True)
rows, labels = torch.randn(256, 64, device=device), torch.randint(10, (256,), device=device)
for _ in steps(120):
    optimizer.zero_grad()
    cross_entropy(model(rows), labels).backward()
    optimizer.step()
