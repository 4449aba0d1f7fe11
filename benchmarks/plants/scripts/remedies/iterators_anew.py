"""
cause: data_loading
told: take batches of one iterator
"""

import torch
from measured import network, steps
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
model = network()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
rows = TensorDataset(torch.randn(300_000, 16), torch.randint(10, (300_000,)))
loader = DataLoader(rows, batch_size=64, shuffle=True)
batches = iter(loader)
for _ in steps():
    inputs, labels = next(iter(loader))
    # -> inputs, labels = next(batches)
    optimizer.zero_grad()
    cross_entropy(model(inputs.repeat(1, 4)), labels).backward()
    optimizer.step()
