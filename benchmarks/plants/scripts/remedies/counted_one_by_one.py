"""
cause: program_code|between_steps
told: for one entry after the other, on whole tensors
"""

import torch
from measured import batch, network, steps
from torch.nn.functional import cross_entropy

torch.set_num_threads(1)
model = network(width=256, layers=1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
confusion = torch.zeros(10, 10, dtype=torch.int64)
for _ in steps():
    rows, labels = batch(1024)
    outputs = model(rows)
    optimizer.zero_grad()
    cross_entropy(outputs, labels).backward()
    optimizer.step()
    for label, found in zip(labels, outputs.argmax(1), strict=True):
        # -> confusion += torch.bincount(10 * labels + outputs.argmax(1), minlength=100).view(10, 10)
        confusion[label, found] += 1
        # ->
