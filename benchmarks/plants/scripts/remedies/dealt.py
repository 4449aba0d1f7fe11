"""
cause: late_rank
told: let each rank load its own part of a batch
ranks: 2
"""

import numpy as np
import torch
import torch.distributed as dist
from measured import network, steps
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.set_num_threads(1)
torch.manual_seed(1)
model = DistributedDataParallel(network(width=256, features=512))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
share = 1
# -> share = dist.get_world_size()


def load(num):
    """Spectra of noise."""
    sounds = np.random.standard_normal((num, 1024)).astype(np.float32)
    return torch.from_numpy(np.abs(np.fft.rfft(sounds)[:, :512]).astype(np.float32))


def batch():
    rows = torch.empty(1024, 512)
    if share > 1 or dist.get_rank() == 0:
        rows[: 1024 // share] = load(1024 // share)
    if share == 1:
        dist.broadcast(rows, 0)
    return rows[dist.get_rank() * 512 :][:512] if share == 1 else rows[:512]


for _ in steps(100):
    rows = batch()
    labels = torch.randint(10, (len(rows),))
    optimizer.zero_grad()
    cross_entropy(model(rows), labels).backward()
    optimizer.step()
dist.destroy_process_group()
