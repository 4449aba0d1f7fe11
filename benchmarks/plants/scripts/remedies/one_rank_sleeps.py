"""
cause: late_rank
told: move what .*one_rank_sleeps.py:\d+ waits for on rank 1 to another thread or process
ranks: 2
"""

import threading  # noqa: F401
import time

import torch
import torch.distributed as dist
from measured import batch, network, steps
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel


def written(loss):
    time.sleep(0.02)  # a slow disk


dist.init_process_group("gloo")
torch.set_num_threads(1)
model = DistributedDataParallel(network(width=128))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in steps():
    rows, labels = batch()
    optimizer.zero_grad()
    loss = cross_entropy(model(rows), labels)
    if dist.get_rank() == 1:
        written(loss.item())
        # -> threading.Thread(target=written, args=(loss.item(),)).start()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
