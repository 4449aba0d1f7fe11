"""
cause: no_prefetch|transfer
told: sharding_strategy=ShardingStrategy.SHARD_GRAD_OP
ranks: 2
"""

import torch
import torch.distributed as dist
from measured import batch, network, steps
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.functional import cross_entropy

dist.init_process_group("gloo")
torch.set_num_threads(1)
model = FullyShardedDataParallel(
    network(width=1024, layers=6),
    auto_wrap_policy=ModuleWrapPolicy({torch.nn.Linear}),
    sharding_strategy=ShardingStrategy.FULL_SHARD,
    # -> sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
    device_id=torch.device("cpu"),
    use_orig_params=True,
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in steps():
    rows, labels = batch(128)
    optimizer.zero_grad()
    cross_entropy(model(rows), labels).backward()
    optimizer.step()
dist.destroy_process_group()
