"""
cause: transfer|no_prefetch
told: reshard_after_forward=False where memory allows|fully_shard each block|set_modules_to_forward_prefetch
device: cuda
ranks: 2
"""

import torch
import torch.distributed as dist
from measured import network, steps
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

dist.init_process_group("nccl")
device = torch.device("cuda", dist.get_rank())
torch.cuda.set_device(device)
model = network(width=4096, layers=10).to(device)
for layer in model[2:-1:2]:
    fully_shard(layer)
    # -> fully_shard(layer, reshard_after_forward=False)
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
rows, labels = torch.randn(512, 64, device=device), torch.randint(10, (512,), device=device)
for _ in steps(600):
    optimizer.zero_grad()
    cross_entropy(model(rows), labels).backward()
    optimizer.step()
dist.destroy_process_group()
