"""
cause: data_loading
told: draw as many numbers as an epoch uses
"""

from itertools import islice

import torch
from measured import network, steps
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, RandomSampler, TensorDataset  # noqa: F401

torch.set_num_threads(1)
model = network(width=64, layers=1, features=8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
rows = TensorDataset(torch.randn(1_000_000, 8), torch.randint(10, (1_000_000,)))
loader = DataLoader(rows, batch_size=32, shuffle=True)
# -> part = RandomSampler(rows, replacement=True, num_samples=20 * 32)
# -> loader = DataLoader(rows, batch_size=32, sampler=part)
batches = iter(())
for step in steps(240):
    if step % 20 == 0:
        batches = islice(loader, 20)
    inputs, labels = next(batches)
    optimizer.zero_grad()
    cross_entropy(model(inputs), labels).backward()
    optimizer.step()
