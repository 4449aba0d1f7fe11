"""
cause: optimizer
told: at gpu_groups_of_one.py:\d+. make
device: cuda
"""

import torch
from measured import network, place, steps
from torch.nn.functional import cross_entropy

device = place()
model = network(width=1024, layers=100).to(device)
each = [{"params": [one], "weight_decay": 0.01 * (one.ndim > 1)} for one in model.parameters()]
decayed = [one for one in model.parameters() if one.ndim > 1]
others = [one for one in model.parameters() if one.ndim <= 1]
two = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(each, lr=1e-4)
# -> optimizer = torch.optim.AdamW(two, lr=1e-4, fused=True)
rows, labels = torch.randn(4096, 64, device=device), torch.randint(10, (4096,), device=device)
for _ in steps(150):
    optimizer.zero_grad()
    cross_entropy(model(rows), labels).backward()
    optimizer.step()
