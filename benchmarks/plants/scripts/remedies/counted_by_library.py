"""
cause: small_messages|transfer
told: 'calls them, and the program has none to remove: .*: at .*counted_by_library.py:\d+'
ranks: 2
library: torchmetrics
"""

import torch
import torch.distributed as dist
from measured import batch, network, steps
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

dist.init_process_group("gloo")
torch.set_num_threads(1)
model = DistributedDataParallel(network(width=128))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
losses, hits = MeanMetric(), MulticlassAccuracy(10)
for step in steps(150):
    rows, labels = batch(64)
    optimizer.zero_grad()
    scores = model(rows)
    loss = cross_entropy(scores, labels)
    loss.backward()
    optimizer.step()
    losses.update(loss.detach())
    hits.update(scores.detach(), labels)
    if step % 1 == 0:
        # -> if step % 25 == 0:
        print(losses.compute(), hits.compute())
dist.destroy_process_group()
