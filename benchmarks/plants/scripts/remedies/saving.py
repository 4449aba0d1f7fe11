"""
cause: checkpoint
told: save less often
"""

import tempfile

import torch
from measured import batch, network, steps
from torch.nn.functional import cross_entropy

torch.set_num_threads(1)
model = network(width=1024)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with tempfile.TemporaryDirectory() as folder:
    for step in steps():
        rows, labels = batch()
        optimizer.zero_grad()
        cross_entropy(model(rows), labels).backward()
        optimizer.step()
        if step % 2 == 1:
            # -> if step % 30 == 29:
            torch.save(model.state_dict(), f"{folder}/last.pt")
