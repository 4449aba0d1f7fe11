"""
cause: garbage_collection
told: gc.disable\(\) before the loop and gc.collect\(1\) every N steps
"""

import gc

import torch
from measured import batch, network, steps
from torch.nn.functional import cross_entropy

torch.set_num_threads(1)
model = network(width=256)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
known = [[index, []] for index in range(200_000)]
num = 0
# -> gc.disable()
# -> num = 10
for step in steps(90):
    rows, labels = batch(64)
    seen = [[index, []] for index in range(30_000)]
    if num and step % num == 0:
        gc.collect(1)
    optimizer.zero_grad()
    cross_entropy(model(rows), labels).backward()
    optimizer.step()
