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
text = json.dumps([{"id": number, "words": ["a", "page"] * 40} for number in range(4000)])
parsed = json.loads(text)
for _ in steps():
    rows, labels = batch()
    pages = json.loads(text)
    # -> pages = parsed
    rows = rows + len(pages) / 4000
    optimizer.zero_grad()
    cross_entropy(model(rows), labels).backward()
    optimizer.step()
