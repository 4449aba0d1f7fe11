"""A loop with a common mistake: every micro-batch synchronises gradients, where only the last one needs to.

torchrun --standalone --nproc_per_node 2 examples/accumulation.py     (MENDED=1: without the mistake)
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

MENDED = bool(os.environ.get("MENDED"))

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(*[nn.Linear(512, 512) for _ in range(6)]))
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(40):
    for micro_batch in range(4):
        batch = torch.randn(32, 512)
        model.require_backward_grad_sync = micro_batch == 3 or not MENDED
        model(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
