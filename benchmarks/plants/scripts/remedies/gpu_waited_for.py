"""
cause: transfer
told: async_op=True with work between call and wait
device: cuda
ranks: 2
"""

import torch
import torch.distributed as dist
from measured import network, place, steps

device = place()
model = network(width=2048, layers=6, classes=2048).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
queue = torch.randn(64 << 20, device=device)
rows = torch.randn(8192, 64, device=device)
for _ in steps(150):
    optimizer.zero_grad()
    dist.all_reduce(queue, op=dist.ReduceOp.AVG)
    # -> sent = dist.all_reduce(queue, op=dist.ReduceOp.AVG, async_op=True)
    model(rows).square().mean().backward()
    for parameter in model.parameters():
        parameter.grad.clamp_(-1, 1)
    model[0].weight.grad.mul_(queue[:1])
    # -> sent.wait()
    # -> model[0].weight.grad.mul_(queue[:1])
    optimizer.step()
dist.destroy_process_group()
