"""
cause: transfer
told: send tokens \(or embeddings\) in bf16
ranks: 2
"""

import torch
import torch.distributed as dist
from measured import network, steps

dist.init_process_group("gloo")
torch.set_num_threads(1)
dtype = torch.float32
# -> dtype = torch.bfloat16


class Sent(torch.autograd.Function):
    """Half of the rows of each rank to the other one, and gradients back."""

    @staticmethod
    def forward(ctx, rows):
        given = torch.empty(rows.shape, dtype=dtype)
        dist.all_to_all_single(given, rows.to(dtype))
        return given.to(rows.dtype)

    @staticmethod
    def backward(ctx, gradient):
        return Sent.apply(gradient.contiguous())


expert = network(width=64, layers=1, features=512, classes=512)
optimizer = torch.optim.SGD(expert.parameters(), lr=0.01)
tokens = torch.randn(4096, 512)
for _ in steps():
    optimizer.zero_grad()
    Sent.apply(expert(Sent.apply(tokens))).square().mean().backward()
    optimizer.step()
dist.destroy_process_group()
