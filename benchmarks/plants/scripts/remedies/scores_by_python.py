"""
cause: program_code|between_steps
told: do what .*scores_by_python.py:\d+ does .*in one step of N or in another process
"""

import torch
from measured import batch, network, steps
from torch.nn.functional import cross_entropy

torch.set_num_threads(1)
model = network()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)


def distance(first, second):
    row = list(range(len(second) + 1))
    for place, letter in enumerate(first):
        row, above = [place + 1], row
        for other, near in enumerate(second):
            row.append(min(row[-1] + 1, above[other + 1] + 1, above[other] + (letter != near)))
    return row[-1]


texts = [f"{number:07d}" * 6 for number in range(0, 32000, 1000)]
errors = []
for step in steps(120):
    rows, labels = batch()
    optimizer.zero_grad()
    cross_entropy(model(rows), labels).backward()
    if step % 1 == 0:
        # -> if step % 20 == 0:
        errors.append(sum(distance(texts[0], text) for text in texts))
    optimizer.step()
