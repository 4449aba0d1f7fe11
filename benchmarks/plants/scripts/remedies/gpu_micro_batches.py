"""
cause: bubble|late_rank
told: 'more micro-batches per step: .* of the same size'
device: cuda
ranks: 2
"""

import torch
import torch.distributed as dist
from measured import network, place, steps
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.functional import mse_loss

NUM = 2
# -> NUM = 12
device = place()
stage = network(width=2048, layers=8, features=1024, classes=1024).to(device)
optimizer = torch.optim.SGD(stage.parameters(), lr=0.001, fused=True)
schedule = Schedule1F1B(PipelineStage(stage, dist.get_rank(), 2, device), NUM, loss_fn=mse_loss)
rows = torch.randn(NUM * 4096, 1024, device=device)
for _ in steps(150, work=NUM / 2):
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        schedule.step(rows)
    else:
        schedule.step(target=rows)
    optimizer.step()
dist.destroy_process_group()
