"""
cause: optimizer
told: at never_fused.py:\d+ has no fused form here. AdamW, which has one
"""

import torch
from measured import batch, network, steps
from torch.nn.functional import cross_entropy

torch.set_num_threads(1)
model = network(width=96, layers=80)
optimizer = torch.optim.Adamax(model.parameters(), lr=0.001)
# -> optimizer = torch.optim.AdamW(model.parameters(), lr=0.001, fused=True)
for _ in steps(150):
    rows, labels = batch(16)
    optimizer.zero_grad()
    cross_entropy(model(rows), labels).backward()
    optimizer.step()
