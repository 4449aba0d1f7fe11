"""
cause: wide_dtype|transfer
told: MixedPrecisionPolicy\(reduce_dtype=torch.\w+\)
device: cuda
ranks: 2
"""

import torch
import torch.distributed as dist
from measured import network, place, steps
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

device = place()
model = network(width=8192, layers=6).to(device, torch.bfloat16)
policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
# -> policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
for layer in model[2:-1:2]:
    fully_shard(layer, mp_policy=policy, reshard_after_forward=False)
fully_shard(model, mp_policy=policy, reshard_after_forward=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
rows = torch.randn(1024, 64, device=device, dtype=torch.bfloat16)
for _ in steps(200):
    optimizer.zero_grad()
    model(rows).float().square().mean().backward()
    optimizer.step()
dist.destroy_process_group()
