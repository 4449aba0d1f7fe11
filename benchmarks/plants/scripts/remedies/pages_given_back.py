"""
cause: compute
told: ^MALLOC_MMAP_MAX_=0
"""

import ctypes

import torch
from measured import steps
from torch import nn

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
keeps = False
# -> keeps = True
if keeps:  # as the variables of the environment say to glibc
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_MAX, 0)
    libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
optimizer = torch.optim.Adam(model.parameters(), fused=True)
points, values = torch.randn(140_000, 4), torch.randn(140_000, 1)
for _ in steps(40):
    nn.functional.mse_loss(model(points), values).backward()
    optimizer.step()
    optimizer.zero_grad()
