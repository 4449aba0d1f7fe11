"""
cause: small_units
told: auto_wrap_policy=ModuleWrapPolicy\(\{their class\}\)
ranks: 2
"""

import torch
import torch.distributed as dist
from measured import batch, network, steps
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.functional import cross_entropy

dist.init_process_group("gloo")
torch.set_num_threads(1)
model = torch.nn.Sequential(*(network(width=64, layers=3, classes=64) for _ in range(6)))
classes = {torch.nn.Linear}
# -> classes = {torch.nn.Sequential}
model = FullyShardedDataParallel(
    model, auto_wrap_policy=ModuleWrapPolicy(classes), device_id=torch.device("cpu"), use_orig_params=True
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in steps(60):
    rows, labels = batch(16, classes=64)
    optimizer.zero_grad()
    cross_entropy(model(rows), labels).backward()
    optimizer.step()
dist.destroy_process_group()
