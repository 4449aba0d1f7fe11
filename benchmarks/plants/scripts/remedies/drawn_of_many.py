"""
cause: between_steps|program_code
told: draw with numpy's Generator
"""

import numpy as np
import torch
from measured import network, steps
from torch.nn.functional import cross_entropy

torch.set_num_threads(1)
pages, kinds = torch.randn(1_000_000, 64), torch.randint(10, (1_000_000,))
model = network()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
generator = np.random.default_rng(1)
for _ in steps():
    drawn = np.random.choice(len(pages), 256, replace=False)
    # -> drawn = generator.choice(len(pages), 256, replace=False, shuffle=False)
    chosen = torch.from_numpy(drawn)
    optimizer.zero_grad()
    cross_entropy(model(pages[chosen]), kinds[chosen]).backward()
    optimizer.step()
