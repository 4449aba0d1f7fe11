"""
cause: program_code
told: on the device, with torch's functions in place of numpy's and Python's
device: cuda
"""

import numpy as np
import torch
from measured import network, place, steps
from torch import nn
from torch.nn.functional import cross_entropy

device = place()


class Weighted(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.ModuleList(
            network(width=4096, layers=2, features=1024, classes=1024) for _ in range(4)
        )
        self.outer = nn.Linear(1024, 10)

    def forward(self, rows, places):
        for inner in self.inner:
            near = np.exp(-np.abs(np.subtract.outer(places, places)) / 100.0).mean(axis=1)
            # -> known = torch.as_tensor(places, device=rows.device, dtype=torch.float32)
            # -> near = torch.exp(-(known[:, None] - known).abs() / 100.0).mean(dim=1)
            rows = inner(rows) * torch.as_tensor(near, device=rows.device, dtype=torch.float32)[:, None]
        return self.outer(rows)


model = Weighted().to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
rows, labels = torch.randn(1024, 1024, device=device), torch.randint(10, (1024,), device=device)
for _ in steps(200):
    places = np.random.randint(0, 4096, 1024)
    optimizer.zero_grad()
    cross_entropy(model(rows, places), labels).backward()
    optimizer.step()
