"""
cause: program_code
told: in their running sum, which is kept
"""

import numpy as np
import torch
from measured import network, steps
from torch.nn.functional import cross_entropy

ROWS = 1_000_000
rng = np.random.default_rng(0)
features, targets = torch.randn(ROWS, 16), torch.randint(10, (ROWS,))
weights = rng.random(ROWS) ** 0.6
chances = weights / weights.sum()
sums = np.cumsum(weights)
model = network(256, 2, 16)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in steps(120):
    rows = rng.choice(ROWS, 512, p=chances)
    # -> rows = np.searchsorted(sums, rng.random(512) * sums[-1])
    optimizer.zero_grad()
    cross_entropy(model(features[rows]), targets[rows]).backward()
    optimizer.step()
