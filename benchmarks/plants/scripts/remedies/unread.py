"""
cause: compute
told: requires_grad_\(False\) for .+, (where their module is made|before the optimizer of others)
"""

import torch
from measured import batch, network, steps
from torch.nn.functional import cross_entropy

torch.set_num_threads(1)
trunk, head = network(width=512, layers=4, classes=512), network(features=512, layers=3)
# -> trunk, head = network(width=512, layers=4, classes=512), network(features=512, layers=3)
# -> trunk.requires_grad_(False)
optimizer = torch.optim.SGD(head.parameters(), lr=0.01)
for _ in steps():
    rows, labels = batch(256)
    optimizer.zero_grad()
    cross_entropy(head(trunk(rows)), labels).backward()
    optimizer.step()
