"""
cause: compute
told: let it compute in fp32
"""

import torch
from measured import batch, network, steps
from torch.nn.functional import cross_entropy

torch.set_num_threads(1)
features, model = network(width=512, layers=2, classes=512).double(), network(features=512, layers=3)
# -> features, model = network(width=512, layers=2, classes=512), network(features=512, layers=3)
optimizer = torch.optim.SGD([*features.parameters(), *model.parameters()], lr=0.01)
for _ in steps():
    rows, labels = batch(256)
    optimizer.zero_grad()
    found = features(rows.double()).float()
    # -> found = features(rows)
    cross_entropy(model(found), labels).backward()
    optimizer.step()
