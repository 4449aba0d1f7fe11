"""
cause: late_rank|program_code
told: let each rank load its own part of a batch
device: cuda
ranks: 2
"""

import numpy as np
import torch
import torch.distributed as dist
from measured import network, place, steps
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

device = place()
model = DistributedDataParallel(network(width=2048, features=1024).to(device), gradient_as_bucket_view=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
share = 1
# -> share = dist.get_world_size()


def load(num):
    """Spectra of noise."""
    sounds = np.random.standard_normal((num, 2048)).astype(np.float32)
    return torch.from_numpy(np.abs(np.fft.rfft(sounds)[:, :1024]).astype(np.float32))


def batch():
    rows = torch.empty(4096, 1024, device=device)
    if share > 1 or dist.get_rank() == 0:
        rows[: 4096 // share] = load(4096 // share).to(device)
    if share == 1:
        dist.broadcast(rows, 0)
    return rows[dist.get_rank() * 2048 :][:2048] if share == 1 else rows[:2048]


for _ in steps(100):
    rows = batch()
    labels = torch.randint(10, (len(rows),), device=device)
    optimizer.zero_grad()
    cross_entropy(model(rows), labels).backward()
    optimizer.step()
dist.destroy_process_group()
