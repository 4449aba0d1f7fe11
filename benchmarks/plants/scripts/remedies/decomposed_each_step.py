"""
cause: program_code|between_steps
told: where what it decomposes hardly changes
"""

import torch
from measured import batch, network, steps
from torch.nn.functional import cross_entropy

torch.set_num_threads(1)
model = network()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
basis = torch.eye(64)
for step in steps():
    rows, labels = batch()
    if step % 1 == 0:
        # -> if step % 20 == 0:
        basis = torch.linalg.svd(torch.cat([model[2].weight[:, :192], rows.T @ rows.repeat(1, 3)]).detach())[
            2
        ][:64, :64]
    rows = rows @ basis
    optimizer.zero_grad()
    cross_entropy(model(rows), labels).backward()
    optimizer.step()
