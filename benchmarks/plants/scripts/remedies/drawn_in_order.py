"""
cause: program_code|between_steps
told: draw an order of all once
"""

import numpy as np
import torch
from measured import network, steps
from torch.nn.functional import cross_entropy

torch.set_num_threads(1)
model = network()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
pages, kinds = torch.randn(1_000_000, 64), torch.randint(10, (1_000_000,))
for _ in steps():
    chosen = torch.from_numpy(np.random.permutation(len(pages))[:256])
    # -> chosen = torch.randint(len(pages), (256,))
    rows, labels = pages[chosen], kinds[chosen]
    optimizer.zero_grad()
    cross_entropy(model(rows), labels).backward()
    optimizer.step()
