"""
cause: small_messages
told: stack the values into one tensor and call all_reduce once a step.*metrics.py:\d+
ranks: 2
"""

import torch
import torch.distributed as dist
from measured import batch, network, steps
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel


def averaged(values):
    for value in values:
        # -> dist.all_reduce(torch.stack(values))
        dist.all_reduce(value)
        # ->
    return values


dist.init_process_group("gloo")
torch.set_num_threads(1)
model = DistributedDataParallel(network(width=128))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in steps(150):
    rows, labels = batch(64)
    optimizer.zero_grad()
    loss = cross_entropy(model(rows), labels)
    loss.backward()
    optimizer.step()
    averaged([loss.detach() / number for number in range(1, 41)])
dist.destroy_process_group()
