"""
cause: compute
told: let it compute in fp32
device: cuda
"""

import torch
from measured import network, steps
from torch.nn.functional import cross_entropy

device = torch.device("cuda")
features, model = network(width=2048, layers=2, classes=2048).double(), network(width=2048, features=2048)
# -> features, model = network(width=2048, layers=2, classes=2048), network(width=2048, features=2048)
features, model = features.to(device), model.to(device)
optimizer = torch.optim.SGD([*features.parameters(), *model.parameters()], lr=0.01)
rows, labels = torch.randn(4096, 64, device=device), torch.randint(10, (4096,), device=device)
for _ in steps(80):
    optimizer.zero_grad()
    found = features(rows.double()).float()
    # -> found = features(rows)
    cross_entropy(model(found), labels).backward()
    optimizer.step()
