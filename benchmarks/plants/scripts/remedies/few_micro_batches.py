"""
cause: bubble
told: more micro-batches per step, an interleaved schedule
ranks: 2
"""

import torch
import torch.distributed as dist
from measured import network, place, steps
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.functional import mse_loss

torch.set_num_threads(1)
device = place()
stage = network(width=256, layers=4, features=128, classes=128)
optimizer = torch.optim.SGD(stage.parameters(), lr=0.001)
num = 2
# -> num = 8
schedule = Schedule1F1B(PipelineStage(stage, dist.get_rank(), 2, device), num, loss_fn=mse_loss)
rows = torch.randn(8192, 128)
for _ in steps(40):
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        schedule.step(rows)
    else:
        schedule.step(target=rows)
    optimizer.step()
dist.destroy_process_group()
