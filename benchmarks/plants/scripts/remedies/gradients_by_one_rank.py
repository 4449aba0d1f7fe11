"""
cause: small_messages|transfer
told: in place of one rank that gets all gradients
ranks: 2
"""

import torch
import torch.distributed as dist
from measured import batch, network, steps
from torch.nn.functional import cross_entropy

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()

model = network(width=512, layers=5)
# -> model = torch.nn.parallel.DistributedDataParallel(network(width=512, layers=5))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in steps():
    rows, labels = batch(64)
    optimizer.zero_grad()
    cross_entropy(model(rows), labels).backward()
    for parameter in model.parameters():
        # ->
        parts = [torch.empty_like(parameter) for _ in range(2)] if rank == 0 else None
        # ->
        dist.gather(parameter.grad, parts, dst=0)
        # ->
        if rank == 0:
            # ->
            parameter.grad.copy_(sum(parts) / 2)
            # ->
        dist.broadcast(parameter.grad, 0)
        # ->
    optimizer.step()
dist.destroy_process_group()
