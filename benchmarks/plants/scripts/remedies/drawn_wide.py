"""
cause: program_code|between_steps
told: draw with numpy's Generator, for all samples in one call
"""

import numpy as np
import torch
from measured import batch, network, steps
from torch.nn.functional import cross_entropy

torch.set_num_threads(1)
model = network()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
generator = np.random.default_rng(1)
for _ in steps():
    rows, labels = batch()
    noise = torch.from_numpy(np.random.randn(256, 64, 64)).float()
    # -> noise = torch.from_numpy(generator.standard_normal((256, 64, 64), dtype=np.float32))
    rows = rows + noise.mean(dim=2)
    optimizer.zero_grad()
    cross_entropy(model(rows), labels).backward()
    optimizer.step()
