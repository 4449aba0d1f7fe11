"""
cause: small_units|no_prefetch|transfer
told: several of them in one unit at flat_small_units.py:\d+
ranks: 2
"""

import functools

import torch
import torch.distributed as dist
from measured import batch, network, steps
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy
from torch.nn.functional import cross_entropy

dist.init_process_group("gloo")
torch.set_num_threads(1)
least = 1000
# -> least = 2_500_000
model = FullyShardedDataParallel(
    network(width=96, layers=20),
    auto_wrap_policy=functools.partial(size_based_auto_wrap_policy, min_num_params=least),
    device_id=torch.device("cpu"),
    use_orig_params=True,
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in steps(100):
    rows, labels = batch(16)
    optimizer.zero_grad()
    cross_entropy(model(rows), labels).backward()
    optimizer.step()
dist.destroy_process_group()
