"""
cause: program_code|between_steps
told: ^let .* run in a data set whose batches|^go through texts once
"""

import torch
from measured import network, steps
from torch.nn.functional import cross_entropy

torch.set_num_threads(1)
texts = [" ".join(f"word{(7 * index + place) % 97}" for place in range(300)) for index in range(64)]


def counts(text):
    found = [0.0] * 64
    for letter in text:
        found[ord(letter) % 64] += 1.0
    return found


ready = None
# -> ready = torch.tensor([counts(text) for text in texts])
model = network(width=384)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
labels = torch.randint(10, (64,))
for _ in steps(100):
    rows = torch.tensor([counts(text) for text in texts]) if ready is None else ready
    optimizer.zero_grad()
    cross_entropy(model(rows), labels).backward()
    optimizer.step()
