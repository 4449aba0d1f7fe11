"""
cause: data_loading
told: make whole batches at once, not item by item
"""

import torch
from measured import network, steps
from torch.nn.functional import cross_entropy
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset  # noqa: F401

torch.set_num_threads(1)
model = network(width=64, layers=1, features=8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
rows = TensorDataset(torch.randn(40_000, 8), torch.randint(10, (40_000,)))
loader = DataLoader(rows, batch_size=64, shuffle=True)
# -> loader = DataLoader(rows, sampler=BatchSampler(RandomSampler(rows), 64, False), batch_size=None)
batches = iter(loader)
for _ in steps(500):
    inputs, labels = next(batches)
    optimizer.zero_grad()
    cross_entropy(model(inputs), labels).backward()
    optimizer.step()
