"""
cause: data_loading
told: cut batches out of tensors that are ready, without a DataLoader
"""

import torch
from measured import network, steps
from torch.nn.functional import cross_entropy
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

torch.set_num_threads(1)
model = network(width=32, layers=1, features=8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
rows, labels = torch.randn(200_000, 8), torch.randint(10, (200_000,))
examples = TensorDataset(rows, labels)
loader = DataLoader(examples, sampler=BatchSampler(RandomSampler(examples), 200, False), batch_size=None)
# -> order = torch.randperm(200_000)
# -> loader = zip(rows[order].split(200), labels[order].split(200), strict=True)
batches = iter(loader)
for _ in steps(900):
    inputs, aims = next(batches)
    optimizer.zero_grad()
    cross_entropy(model(inputs), aims).backward()
    optimizer.step()
