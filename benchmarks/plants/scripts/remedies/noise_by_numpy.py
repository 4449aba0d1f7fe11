"""
cause: program_code
told: ^draw with numpy's Generator
"""

import numpy as np
import torch
from measured import batch, steps
from torch import nn
from torch.nn.functional import cross_entropy

torch.set_num_threads(1)
rng = np.random.default_rng()


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(64, 64)

    def forward(self, x):
        noise = np.random.randn(*x.shape)
        # -> noise = rng.standard_normal(tuple(x.shape), dtype=np.float32)
        return torch.relu(self.inner(x)) + 0.1 * torch.from_numpy(noise).float()


model = nn.Sequential(*(Noisy() for _ in range(6)), nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in steps():
    rows, labels = batch(768)
    optimizer.zero_grad()
    cross_entropy(model(rows), labels).backward()
    optimizer.step()
