"""
cause: compute
told: call the model on more rows at a time
"""

import torch
from measured import batch, network, steps
from torch.nn.functional import cross_entropy

torch.set_num_threads(1)
model = network(layers=3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
calls = 32
# -> calls = 1
for _ in steps(150):
    optimizer.zero_grad()
    for _ in range(calls):
        rows, labels = batch(128 // calls)
        (cross_entropy(model(rows), labels) / calls).backward()
    optimizer.step()
