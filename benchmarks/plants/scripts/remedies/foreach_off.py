"""
cause: optimizer
told: fused=True at foreach_off.py:\d+. AdamW has it on a CPU too
"""

import torch
from measured import batch, network, steps
from torch.nn.functional import cross_entropy

torch.set_num_threads(1)
model = network(width=32, layers=80)
optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
# -> optimizer = torch.optim.AdamW(model.parameters(), fused=True)
for _ in steps(150):
    rows, labels = batch(16)
    optimizer.zero_grad()
    cross_entropy(model(rows), labels).backward()
    optimizer.step()
