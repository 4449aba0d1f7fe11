"""
cause: small_messages
told: ^leave TORCH_NCCL_BLOCKING_WAIT=1 out of the environment
device: cuda
ranks: 2
"""

import os

import torch
import torch.distributed as dist
from measured import place, steps
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"
# ->
device = place()


def block(channels):
    return nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU())


model = nn.Sequential(
    nn.Conv2d(3, 64, 3, padding=1), *(block(64) for _ in range(40)),
    nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
)  # fmt: skip
model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
model = DistributedDataParallel(model.to(device), gradient_as_bucket_view=True, broadcast_buffers=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
images, labels = torch.randn(64, 3, 28, 28, device=device), torch.randint(10, (64,), device=device)
for _ in steps(200):
    optimizer.zero_grad()
    cross_entropy(model(images), labels).backward()
    optimizer.step()
dist.destroy_process_group()
