"""
cause: data_loading
told: check the data source of rank 1
ranks: 2
"""

import time

import torch
import torch.distributed as dist
from measured import network, steps
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset


class Shard(Dataset):
    def __init__(self, is_far):
        self.is_far = is_far

    def __len__(self):
        return 100_000

    def __getitem__(self, index):
        if self.is_far:
            time.sleep(0.002)
        return torch.full((64,), float(index % 7)), index % 10


dist.init_process_group("gloo")
torch.set_num_threads(1)
model = DistributedDataParallel(network(width=128))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
shard = Shard(is_far=dist.get_rank() == 1)
# -> shard = Shard(is_far=False)
batches = iter(DataLoader(shard, batch_size=8))
for _ in steps():
    rows, labels = next(batches)
    optimizer.zero_grad()
    cross_entropy(model(rows), labels).backward()
    optimizer.step()
dist.destroy_process_group()
