"""
cause: pause
told: "give torch more than its one thread: torch.set_num_threads\\(\\d+\\) or OMP_NUM_THREADS"
device: cuda
ranks: 2
"""

import torch
import torch.distributed as dist
from measured import network, place, steps
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

device = place()
# -> device = place()
# -> torch.set_num_threads(6)
model = DistributedDataParallel(network(1024, 6, 64, 64).to(device))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, fused=True)
positions = torch.randn(4096, 1024)
places = torch.randn(4096, 1024)


def scan(positions, places):
    gap = (positions - places).square() + 0.1
    return torch.where(gap > 1.0, gap.sqrt(), gap.exp()).cos()


for step in steps(240):
    if step % 4 == 0:
        for _ in range(3):
            places = scan(positions, places)
        rows = places[:, :64].to(device)
    optimizer.zero_grad(set_to_none=True)
    mse_loss(model(rows[step % 4 :: 4]), rows[step % 4 :: 4]).backward()
    optimizer.step()
dist.destroy_process_group()
