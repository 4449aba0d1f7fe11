"""
cause: optimizer
told: at groups_of_one.py:\d+. make
"""

import torch
from measured import batch, network, steps
from torch.nn.functional import cross_entropy

torch.set_num_threads(1)
model = network(width=32, layers=80)
decayed = [parameter for parameter in model.parameters() if parameter.ndim > 1]
others = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
two = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
each = [{"params": [one], "weight_decay": 0.01 * (one.ndim > 1)} for one in model.parameters()]
optimizer = torch.optim.AdamW(each, lr=1e-3)
# -> optimizer = torch.optim.AdamW(two, lr=1e-3, fused=True)
for _ in steps(150):
    rows, labels = batch(16)
    optimizer.zero_grad()
    cross_entropy(model(rows), labels).backward()
    optimizer.step()
