"""
cause: garbage_collection
told: gc.freeze\(\) after set-up
"""

import gc

import torch
from measured import batch, network, steps
from torch.nn.functional import cross_entropy

torch.set_num_threads(1)
vocabulary = [{"word": str(number), "places": [number]} for number in range(400_000)]
model = network(width=128)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in steps():
    rows, labels = batch()
    optimizer.zero_grad()
    cross_entropy(model(rows), labels).backward()
    optimizer.step()
    if step % 3 == 0:
        gc.collect()
    if step < 0:
        # -> if step == 6:
        gc.freeze()
