"""
cause: small_messages
told: ZeroRedundancyOptimizer\(..., parameters_as_bucket_view=True\) at zero.py:\d+
ranks: 2
"""

import torch
import torch.distributed as dist
from measured import batch, network, steps
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.set_num_threads(1)
model = DistributedDataParallel(network(width=96, layers=40))
as_one = False
# -> as_one = True
optimizer = ZeroRedundancyOptimizer(
    model.parameters(), torch.optim.SGD, parameters_as_bucket_view=as_one, lr=0.01
)
for _ in steps(150):
    rows, labels = batch(16)
    optimizer.zero_grad()
    cross_entropy(model(rows), labels).backward()
    optimizer.step()
dist.destroy_process_group()
