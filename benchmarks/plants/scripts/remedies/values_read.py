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
for _ in steps():
    rows, labels = batch()
    values = rows.view(-1)
    cut = [min(value.item(), 0.5) for value in values]
    # -> cut = values.clamp(max=0.5)
    rows = torch.tensor(cut).view(256, 64)
    # -> rows = cut.view(256, 64)
    optimizer.zero_grad()
    cross_entropy(model(rows), labels).backward()
    optimizer.step()
