"""
cause: imbalance|late_rank
told: a load-balancing loss or bias in the router
device: cuda
ranks: 2
"""

import torch
import torch.distributed as dist
from measured import network, place, steps
from torch import nn

device = place()
me = dist.get_rank()


class Sent(torch.autograd.Function):
    """Rows to the ranks of their experts, and gradients back."""

    @staticmethod
    def forward(ctx, rows, sent, received):
        ctx.sizes = sent, received
        given = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(given, rows.contiguous(), received, sent)
        return given

    @staticmethod
    def backward(ctx, gradient):
        sent, received = ctx.sizes
        back = gradient.new_empty(sum(sent), gradient.shape[1])
        dist.all_to_all_single(back, gradient.contiguous(), sent, received)
        return back, None, None


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.expert = network(width=4096, layers=2, features=1024, classes=1024)

    def forward(self, rows):
        num_first = 7 * len(rows) // 8  # that the router sends to the expert of rank 0
        # -> num_first = len(rows) // 2
        sent = [num_first, len(rows) - num_first]
        received = [sent[me]] * 2
        done = self.expert(Sent.apply(rows, sent, received))
        return rows + Sent.apply(done, received, sent)


model = nn.Sequential(*(Layer() for _ in range(4))).to(device, torch.bfloat16)
optimizer = torch.optim.SGD(model.parameters(), lr=0.001, fused=True)
rows = torch.randn(16384, 1024, device=device, dtype=torch.bfloat16)
for _ in steps(160):
    optimizer.zero_grad()
    model(rows).float().square().mean().backward()
    optimizer.step()
dist.destroy_process_group()
