"""
cause: compute
told: ^let the process use all \d+ cores
"""

import os

os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
# -> pass

from measured import batch, network, steps  # noqa: E402
from torch.nn.functional import cross_entropy  # noqa: E402
from torch.optim import SGD  # noqa: E402

model = network(width=1024)
optimizer = SGD(model.parameters(), lr=0.01)
rows, labels = batch(512)
for _ in steps(100):
    optimizer.zero_grad()
    cross_entropy(model(rows), labels).backward()
    optimizer.step()
