"""
cause: bubble|late_rank
told: move layers from the stage of rank 1 to the others
ranks: 2
"""

import torch
import torch.distributed as dist
from measured import network, place, steps
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.functional import mse_loss

torch.set_num_threads(1)
device = place()
num_layers = (2, 10)
# -> num_layers = (6, 6)
stage = network(width=384, layers=num_layers[dist.get_rank()], features=128, classes=128)
optimizer = torch.optim.SGD(stage.parameters(), lr=0.001)
schedule = Schedule1F1B(PipelineStage(stage, dist.get_rank(), 2, device), 8, loss_fn=mse_loss)
rows = torch.randn(1024, 128)
for _ in steps(40):
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        schedule.step(rows)
    else:
        schedule.step(target=rows)
    optimizer.step()
dist.destroy_process_group()
