"""
cause: imbalance
told: give all ranks as much work
device: cuda
ranks: 2
"""

import torch
import torch.distributed as dist
from measured import place, steps
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Neighbours(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(64, 256), nn.Linear(256, 256)

    def forward(self, nodes, source, target):
        nodes = self.embed(nodes)
        return self.head(torch.zeros_like(nodes).index_add(0, target, nodes[source]))


device = place()
model = DistributedDataParallel(Neighbours().to(device), gradient_as_bucket_view=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
parts = (4_000_000, 1_000_000)
# -> parts = (2_500_000, 2_500_000)
nodes = torch.randn(100_000, 64, device=device)
source, target = torch.randint(len(nodes), (2, parts[dist.get_rank()]), device=device)
for _ in steps(150):
    optimizer.zero_grad()
    model(nodes, source, target).square().mean().backward()
    optimizer.step()
dist.destroy_process_group()
