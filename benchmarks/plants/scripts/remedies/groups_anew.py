"""
cause: pause
told: make the process group of .* once, before training
ranks: 2
"""

import torch
import torch.distributed as dist
from measured import batch, network, steps
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel


def shared(loss):
    group = dist.new_group(backend="gloo")
    # ->
    total = loss.detach().clone()
    dist.all_reduce(total, group=group)
    dist.destroy_process_group(group)
    # ->
    return total


dist.init_process_group("gloo")
torch.set_num_threads(1)
group = None
# -> group = dist.new_group(backend="gloo")
model = DistributedDataParallel(network(width=256, layers=4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in steps(150):
    rows, labels = batch(64)
    optimizer.zero_grad()
    loss = cross_entropy(model(rows), labels)
    loss.backward()
    optimizer.step()
    shared(loss)
dist.destroy_process_group()
