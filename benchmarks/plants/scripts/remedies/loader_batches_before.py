"""
cause: data_loading
told: prepare batches before training
ranks: 2
"""

import torch
import torch.distributed as dist
from measured import network, steps
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset


def features(index):
    counts = [0.0] * 64
    for place in range(40_000):
        counts[(index * 7919 + place * place) % 64] += 1.0
    return torch.tensor(counts).repeat(32, 1)


class Batches(Dataset):
    def __init__(self):
        self.known = {}
        # -> self.known = {index: features(index) for index in range(8)}

    def __len__(self):
        return 1000

    def __getitem__(self, index):
        index %= 8
        return self.known[index] if index in self.known else features(index)


dist.init_process_group("gloo")
torch.set_num_threads(1)
model = DistributedDataParallel(network(width=256))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
batches = iter(DataLoader(Batches(), batch_size=None))
labels = torch.randint(10, (32,))
for _ in steps():
    optimizer.zero_grad()
    cross_entropy(model(next(batches)), labels).backward()
    optimizer.step()
dist.destroy_process_group()
