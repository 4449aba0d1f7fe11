"""
cause: program_code|compute
told: make the costs of all samples
library: scipy
"""

import torch
from measured import network, steps
from scipy.optimize import linear_sum_assignment
from torch.nn.functional import l1_loss

torch.set_num_threads(1)
model = network(width=128, layers=1, features=128, classes=400)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)


def matched(boxes, goals):
    found = []
    for some, wanted in zip(boxes, goals, strict=True):
        costs = torch.cdist(some, wanted, p=1).detach().numpy()
        # -> some, wanted = some.detach(), wanted[:10]  # all but ten are padding
        # -> costs = torch.cdist(some, wanted, p=1).numpy()
        found.append(linear_sum_assignment(costs)[0])
    return found


for _ in steps(60):
    rows, goals = torch.randn(16, 128), torch.rand(16, 100, 4)
    goals[:, 10:] = 0
    boxes = model(rows).view(16, 100, 4)
    places = matched(boxes, goals)
    optimizer.zero_grad()
    l1_loss(
        torch.stack([some[place[:10]] for some, place in zip(boxes, places, strict=True)]), goals[:, :10]
    ).backward()
    optimizer.step()
