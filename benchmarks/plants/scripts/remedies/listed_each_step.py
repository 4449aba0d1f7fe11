"""
cause: program_code|between_steps
told: list files once
"""

import os
import tempfile

import torch
from measured import batch, network, steps
from torch.nn.functional import cross_entropy

torch.set_num_threads(1)
model = network()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
folder = tempfile.mkdtemp()
for number in range(20_000):
    open(f"{folder}/{number}.txt", "w").close()
names = os.listdir(folder)
for _ in steps():
    names = os.listdir(folder)
    # ->
    rows, labels = batch()
    rows[:, 0] += len(names) / 20_000
    optimizer.zero_grad()
    cross_entropy(model(rows), labels).backward()
    optimizer.step()
