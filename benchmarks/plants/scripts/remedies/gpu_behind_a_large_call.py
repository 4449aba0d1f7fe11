"""
cause: shared_communicator|transfer
told: give small calls a group of their own
device: cuda
ranks: 2
"""

import torch
import torch.distributed as dist
from measured import network, place, steps

device = place()
own = dist.group.WORLD
# -> own = dist.new_group()
model = network(width=2048, layers=6, classes=2048).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
memory = torch.randn(128 << 20, device=device)
rows = torch.randn(8192, 64, device=device)
for _ in steps(150):
    optimizer.zero_grad()
    sent = dist.all_reduce(memory, op=dist.ReduceOp.AVG, async_op=True)
    center = rows.mean(dim=0)
    dist.all_reduce(center, op=dist.ReduceOp.AVG, group=own)
    model(rows - center).square().mean().backward()
    for parameter in model.parameters():
        parameter.grad.clamp_(-1, 1)
    optimizer.step()
    sent.wait()
dist.destroy_process_group()
