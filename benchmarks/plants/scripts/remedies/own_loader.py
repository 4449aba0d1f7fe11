"""
cause: program_code|between_steps
told: do what .*own_loader.py:\d+ does in a data set whose batches workers of a DataLoader make
"""

import torch
from measured import network, steps
from torch.nn.functional import cross_entropy


def examples():
    for index in range(100_000):
        row = [((index * 7919 + place) % 1000) / 1000 for place in range(64)]
        yield torch.tensor(row), index % 10


def batches(rows):
    while True:
        chosen = [next(rows) for _ in range(256)]
        # -> chosen = READY
        yield torch.stack([row for row, _ in chosen]), torch.tensor([label for _, label in chosen])


torch.set_num_threads(1)
source = examples()
READY = [next(source) for _ in range(256)]
model = network()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
endless = batches(source)
for _ in steps():
    inputs, labels = next(endless)
    optimizer.zero_grad()
    cross_entropy(model(inputs), labels).backward()
    optimizer.step()
