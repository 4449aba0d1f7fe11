"""
cause: no_prefetch|transfer
told: backward_prefetch=BackwardPrefetch.BACKWARD_PRE
device: cuda
ranks: 2
"""

import torch
import torch.distributed as dist
from measured import place, steps
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch, FullyShardedDataParallel  # noqa: F401
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.functional import cross_entropy

device = place()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4096, 8192), nn.ReLU(), nn.Linear(8192, 4096))

    def forward(self, rows):
        return rows + self.inner(rows)


model = FullyShardedDataParallel(
    nn.Sequential(nn.Linear(64, 4096), *(Block() for _ in range(8)), nn.Linear(4096, 10)).to(device),
    auto_wrap_policy=ModuleWrapPolicy({Block}),
    backward_prefetch=None,
    # -> backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
    forward_prefetch=False,
    # -> forward_prefetch=True,
    use_orig_params=True,
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.001, fused=True)
rows, labels = torch.randn(2048, 64, device=device), torch.randint(10, (2048,), device=device)
for _ in steps(120):
    optimizer.zero_grad()
    cross_entropy(model(rows), labels).backward()
    optimizer.step()
dist.destroy_process_group()
