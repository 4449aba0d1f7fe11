"""
cause: data_loading
told: ^let each rank load its own part
ranks: 2
"""

import torch
import torch.distributed as dist
from measured import network, steps
from torch.nn.functional import avg_pool2d, cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

torch.set_num_threads(1)
dist.init_process_group("gloo")


class Images(Dataset):
    def __len__(self):
        return 4096

    def __getitem__(self, index):
        return avg_pool2d(torch.randn(1, 3, 32, 32), 3, 1, 1).flatten(), index % 10


images, rank = Images(), dist.get_rank()
loader = DataLoader(images, batch_size=64)
# -> sampler = torch.utils.data.DistributedSampler(images)
# -> loader = DataLoader(images, batch_size=32, sampler=sampler)
model = DistributedDataParallel(network(width=64, layers=1, features=3072))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _, (rows, labels) in zip(steps(), loader, strict=False):
    optimizer.zero_grad()
    rows, labels = rows[rank::2], labels[rank::2]
    # ->
    cross_entropy(model(rows), labels).backward()
    optimizer.step()
dist.destroy_process_group()
