"""
cause: compute
told: ^let each rank, and the workers that its loader starts, use \d+ of the \d+ cores
device: cuda
ranks: 2
"""

import os

RANK = int(os.environ["LOCAL_RANK"])
os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[RANK]})
# -> pass

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from measured import network, place, steps  # noqa: E402
from torch.nn.functional import cross_entropy  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from torch.utils.data import DataLoader, Dataset  # noqa: E402


class Rows(Dataset):
    def __len__(self):
        return 1 << 20

    def __getitem__(self, place):
        row = torch.randn(64, 64)
        return (row @ row).softmax(1)[0], place % 10


device = place()
model = DistributedDataParallel(network(width=2048, layers=12).to(device), device_ids=[device])
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
loader = iter(DataLoader(Rows(), batch_size=256, num_workers=4, pin_memory=True))
for _ in steps(200):
    rows, labels = (one.to(device, non_blocking=True) for one in next(loader))
    optimizer.zero_grad()
    cross_entropy(model(rows), labels).backward()
    optimizer.step()
dist.destroy_process_group()
