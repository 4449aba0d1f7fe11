"""
cause: no_prefetch|transfer
told: set CUDA_DEVICE_MAX_CONNECTIONS=1
device: cuda
ranks: 2
"""

import os

import torch
import torch.distributed as dist
from measured import place, steps

WIDTH, LAYERS = 8192, 10
os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
# -> os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
device = place()
shards = [torch.randn(WIDTH // 2, WIDTH, device=device, dtype=torch.bfloat16) / 100 for _ in range(LAYERS)]
whole = [torch.empty(WIDTH, WIDTH, device=device, dtype=torch.bfloat16) for _ in range(2)]
head = torch.nn.Linear(WIDTH, 1000, device=device, dtype=torch.bfloat16)
optimizer = torch.optim.AdamW(head.parameters(), lr=1e-4, fused=True)
rows = torch.randn(2048, WIDTH, device=device, dtype=torch.bfloat16)


def gather(layer):
    return dist.all_gather_into_tensor(whole[layer % 2], shards[layer], async_op=True)


for _ in steps(120):
    hidden, coming = rows, gather(0)
    for layer in range(LAYERS):
        coming.wait()
        if layer + 1 < LAYERS:
            coming = gather(layer + 1)
        hidden = torch.tanh(hidden @ whole[layer % 2])
    head(hidden).float().square().mean().backward()
    for parameter in head.parameters():
        dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
