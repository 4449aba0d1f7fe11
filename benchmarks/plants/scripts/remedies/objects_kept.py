"""
cause: garbage_collection
told: gc.disable\(\) before the loop and gc.collect\(1\) every N steps
"""

import gc
from collections import deque

import torch
from measured import batch, network, steps
from torch.nn.functional import cross_entropy

torch.set_num_threads(1)
model = network(width=256)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
seen = deque(maxlen=400_000)
seen.extend([index, {}] for index in range(200_000))
gc.set_threshold(700, 10, 10)
# -> gc.disable()
for step in steps(120):  # noqa: B007
    rows, labels = batch(64)
    seen.extend([index, {}] for index in range(10_000))
    # -> seen.extend([index, {}] for index in range(10_000))
    # -> if step % 10 == 0:
    # ->     gc.collect(1)
    optimizer.zero_grad()
    cross_entropy(model(rows), labels).backward()
    optimizer.step()
