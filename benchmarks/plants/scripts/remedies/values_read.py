"""
cause: program_code|between_steps
told: keep values in tensors
"""

import torch
from measured import batch, network, steps
from torch.nn.functional import cross_entropy

torch.set_num_threads(1)
model = network()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
limits = torch.rand(64)
for _ in steps():
    rows, labels = batch()
    cut = [
        min(value, limit) for row in rows.tolist() for value, limit in zip(row, limits.tolist(), strict=True)
    ]
    # -> rows = torch.minimum(rows, limits)
    rows = torch.tensor(cut).view(256, 64)
    # ->
    optimizer.zero_grad()
    cross_entropy(model(rows), labels).backward()
    optimizer.step()
