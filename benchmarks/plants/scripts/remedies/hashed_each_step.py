"""
cause: program_code|between_steps
told: hash each sample once
"""

import hashlib

import torch
from measured import batch, network, steps
from torch.nn.functional import cross_entropy

torch.set_num_threads(1)
model = network()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
pages = [bytes(100_000) + str(number).encode() for number in range(256)]
digests = [hashlib.sha256(page).digest() for page in pages]
for _ in steps():
    rows, labels = batch()
    hashed = [hashlib.sha256(page).digest() for page in pages]
    # -> hashed = digests
    rows[:, 0] += torch.tensor([one[0] / 256 for one in hashed])
    optimizer.zero_grad()
    cross_entropy(model(rows), labels).backward()
    optimizer.step()
