"""
cause: program_code|between_steps
told: go through what is new in a step alone
"""

import torch
from measured import batch, network, steps
from torch.nn.functional import cross_entropy

torch.set_num_threads(1)
model = network(width=256)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
seen = []


def mean_of_all(values):
    seen.append(values)
    ranked = torch.cat(seen).sort()[0]
    return ranked[len(ranked) // 2]


for step in steps(200):
    rows, labels = batch(512)
    optimizer.zero_grad()
    outputs = model(rows)
    loss = cross_entropy(outputs, labels)
    loss.backward()
    optimizer.step()
    if step % 1 == 0:
        # -> if step % 20 == 0:
        mean_of_all(outputs.detach().flatten())
