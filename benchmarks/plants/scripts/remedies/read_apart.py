"""
cause: compute
told: torch.no_grad\(\) around what is called at .*read_apart.py:\d+, which trains nothing
"""

import torch
from measured import batch, network, steps
from torch.nn.functional import cross_entropy, softmax

torch.set_num_threads(1)
model, teacher = network(width=256), network(width=768, layers=4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)


def aims(rows):
    with torch.enable_grad():
        # -> with torch.no_grad():
        return softmax(teacher(rows), dim=1)


for _ in steps():
    rows, _ = batch()
    optimizer.zero_grad()
    cross_entropy(model(rows), aims(rows)).backward()
    optimizer.step()
