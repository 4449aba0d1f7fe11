"""
cause: no_prefetch|transfer
told: issue the gather of the next layer \(async_op=True\)
device: cuda
ranks: 2
"""

import torch
import torch.distributed as dist
from measured import place, steps

WIDTH, LAYERS = 8192, 10
# -> import os
# -> os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
# -> WIDTH, LAYERS = 8192, 10
device = place()
shards = [torch.randn(WIDTH // 2, WIDTH, device=device, dtype=torch.bfloat16) / 100 for _ in range(LAYERS)]
whole = [torch.empty(WIDTH, WIDTH, device=device, dtype=torch.bfloat16) for _ in range(2)]
parameters = [torch.nn.Parameter(shard) for shard in shards]
optimizer = torch.optim.SGD(parameters, lr=1e-4, fused=True)


def gather(layer, async_op=False):
    return dist.all_gather_into_tensor(whole[layer % 2], parameters[layer].data, async_op=async_op)


rows = torch.randn(2048, WIDTH, device=device, dtype=torch.bfloat16)
for _ in steps(120):
    hidden = rows
    # -> hidden, coming = rows, gather(0, async_op=True)
    for layer in range(LAYERS):
        gather(layer)
        # -> coming.wait()
        # -> coming = gather((layer + 1) % LAYERS, async_op=True)
        hidden = torch.tanh(hidden @ whole[layer % 2])
    change = hidden.T @ rows
    # -> coming.wait()
    # -> change = hidden.T @ rows
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.empty_like(parameter)
    dist.reduce_scatter_tensor(parameters[0].grad, change)
    for parameter in parameters[1:]:
        parameter.grad.copy_(parameters[0].grad)
    optimizer.step()
dist.destroy_process_group()
