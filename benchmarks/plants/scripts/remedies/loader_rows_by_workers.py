"""
cause: data_loading
told: index the dataset with a list .*; Applications\.__getitem__ takes that list then
"""

import torch
from measured import network, steps
from torch.nn.functional import cross_entropy
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler  # noqa: F401

torch.set_num_threads(1)
model = network(width=64, layers=2, features=48)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)


class Applications(Dataset):
    def __init__(self, num):
        self.columns, self.kinds = torch.randn(num, 48), torch.randint(10, (num,))

    def __len__(self):
        return len(self.kinds)

    def __getitem__(self, index):
        return self.columns[index], self.kinds[index]


rows = Applications(2_000_000)
loader = DataLoader(rows, batch_size=8192, shuffle=True, num_workers=1)
# -> loader = DataLoader(rows, sampler=BatchSampler(RandomSampler(rows), 8192, False), batch_size=None)
batches = iter(loader)
for _ in steps(200):
    inputs, labels = next(batches)
    optimizer.zero_grad()
    cross_entropy(model(inputs), labels).backward()
    optimizer.step()
