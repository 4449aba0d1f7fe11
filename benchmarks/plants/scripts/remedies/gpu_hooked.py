"""
cause: program_code
told: leave it out .register_comm_hook
device: cuda
ranks: 2
"""

import torch
import torch.distributed as dist
from measured import network, place, steps
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

device = place()
model = DistributedDataParallel(network(width=1024, layers=24).to(device))
state = PowerSGDState(process_group=None, matrix_approximation_rank=2, start_powerSGD_iter=10)
# ->
model.register_comm_hook(state, powerSGD_hook)
# ->
optimizer = torch.optim.SGD(model.parameters(), lr=0.001, fused=True)
rows, labels = torch.randn(16384, 64, device=device), torch.randint(10, (16384,), device=device)
for _ in steps(200):
    optimizer.zero_grad()
    cross_entropy(model(rows), labels).backward()
    optimizer.step()
dist.destroy_process_group()
