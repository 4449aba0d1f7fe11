"""
cause: garbage_collection
told: leave the gc.collect\(\) of collecting_asked_for.py:\d+ out of the loop
"""

import gc

import torch
from measured import batch, network, steps
from torch.nn.functional import cross_entropy

torch.set_num_threads(1)
model = network(width=128)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
catalogue = [{str(number): [number]} for number in range(100_000)]
for _ in steps(80):
    rows, labels = batch()
    optimizer.zero_grad()
    cross_entropy(model(rows), labels).backward()
    optimizer.step()
    gc.collect()
    # ->
