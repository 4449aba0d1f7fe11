"""
cause: program_code|between_steps
told: parse it once, before training
"""

import json

import torch
from measured import batch, network, steps
from torch.nn.functional import cross_entropy

torch.set_num_threads(1)
model = network()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
text = json.dumps([[number / 7 for number in range(column, column + 256)] for column in range(64)])
parsed = torch.tensor(json.loads(text)).T.contiguous()
for _ in steps():
    rows, labels = batch()
    rows = rows + torch.tensor(json.loads(text)).T
    # -> rows = rows + parsed
    optimizer.zero_grad()
    cross_entropy(model(rows), labels).backward()
    optimizer.step()
