"""
cause: pause
told: do what .*statistics_now_and_then.py:\d+ does over more at once
"""

import torch
from measured import batch, network, steps
from torch.nn.functional import cross_entropy

torch.set_num_threads(1)
model = network()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)


def spread(model):
    for value in model.parameters():
        value.grad.flatten().sort()
    # ->     value.grad.flatten()[::64].sort()


for step in steps(160):
    rows, labels = batch()
    optimizer.zero_grad()
    cross_entropy(model(rows), labels).backward()
    if step % 8 == 7:
        spread(model)
    optimizer.step()
