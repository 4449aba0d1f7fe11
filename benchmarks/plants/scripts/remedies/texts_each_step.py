"""
cause: program_code|between_steps
told: go through texts once, before training
"""

import re

import torch
from measured import batch, network, steps
from torch.nn.functional import cross_entropy

torch.set_num_threads(1)
model = network()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
texts = [f"The {number}th page, of {number * 7} words; and what it says. " * 30 for number in range(256)]
known = {}


def words(text):
    return len(re.findall(r"[a-z]+", text.lower())), len(text.split())


known = {text: words(text) for text in texts}
for _ in steps():
    rows, labels = batch()
    counts = [words(text) for text in texts]
    # -> counts = [known[text] for text in texts]
    rows[:, :2] += torch.tensor(counts) / 1000
    optimizer.zero_grad()
    cross_entropy(model(rows), labels).backward()
    optimizer.step()
