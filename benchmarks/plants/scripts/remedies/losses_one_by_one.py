"""
cause: compute
told: add the losses up and call backward\(\) once
"""

import torch
from measured import network, steps
from torch import nn
from torch.nn.functional import cross_entropy

torch.set_num_threads(1)

trunk, heads = network(classes=512, layers=6), nn.ModuleList(nn.Linear(512, 10) for _ in range(3))
optimizer = torch.optim.SGD([*trunk.parameters(), *heads.parameters()], lr=0.01)
for _ in steps():
    rows, labels = torch.randn(128, 64), torch.randint(10, (3, 128))
    optimizer.zero_grad()
    seen = trunk(rows)
    losses = [cross_entropy(head(seen), of_head) for head, of_head in zip(heads, labels, strict=True)]
    for loss in losses:
        # -> for loss in [sum(losses)]:
        loss.backward(retain_graph=True)
        # -> loss.backward()
    optimizer.step()
