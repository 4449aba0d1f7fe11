"""
cause: transfer
told: fp16_compress_hook
ranks: 2
"""

import torch
import torch.distributed as dist
from measured import batch, network, steps
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.set_num_threads(1)
model = DistributedDataParallel(network(width=1536, layers=3))
hook = fp16_compress_hook
model.train()
# -> model.register_comm_hook(None, hook)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in steps(40):
    rows, labels = batch(16)
    optimizer.zero_grad()
    cross_entropy(model(rows), labels).backward()
    optimizer.step()
dist.destroy_process_group()
