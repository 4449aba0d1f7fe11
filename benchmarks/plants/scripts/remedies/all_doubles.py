"""
cause: compute
told: fp32 for the model
"""

import torch
from measured import batch, network, steps
from torch.nn.functional import cross_entropy

torch.set_num_threads(1)
torch.set_default_dtype(torch.float64)
# ->
model = network(width=512, layers=3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in steps():
    rows, labels = batch(256)
    optimizer.zero_grad()
    cross_entropy(model(rows), labels).backward()
    optimizer.step()
