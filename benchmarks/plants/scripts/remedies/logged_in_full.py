"""
cause: program_code|between_steps
told: log and write in one step of N
"""

import json

import torch
from measured import batch, network, steps
from torch.nn.functional import cross_entropy

torch.set_num_threads(1)
model = network()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
log = []
for step in steps():
    rows, labels = batch()
    optimizer.zero_grad()
    cross_entropy(model(rows), labels).backward()
    optimizer.step()
    if step % 1 == 0:
        # -> if step % 20 == 0:
        log.append(json.dumps(model[0].weight.tolist()))
