"""
cause: compute
told: requires_grad_\(False\) for .+, (where their module is made|before the optimizer of others)
device: cuda
"""

import torch
from measured import network, steps
from torch.nn.functional import cross_entropy

device = torch.device("cuda")
trunk, head = network(width=4096, layers=6, classes=4096), network(width=4096, features=4096, layers=4)
# -> trunk, head = network(width=4096, layers=6, classes=4096), network(width=4096, features=4096, layers=4)
# -> trunk.requires_grad_(False)
trunk, head = trunk.to(device), head.to(device)
optimizer = torch.optim.SGD(head.parameters(), lr=0.01)
rows, labels = torch.randn(8192, 64, device=device), torch.randint(10, (8192,), device=device)
for _ in steps(80):
    optimizer.zero_grad()
    with torch.autocast("cuda", torch.bfloat16):
        loss = cross_entropy(head(trunk(rows)), labels)
    loss.backward()
    optimizer.step()
