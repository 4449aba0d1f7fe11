"""
cause: program_code
told: torch.autograd.set_detect_anomaly\(False\)
"""

import torch
from measured import batch, network, steps
from torch.nn.functional import cross_entropy

torch.set_num_threads(1)
torch.autograd.set_detect_anomaly(True)
# ->
model = network(width=128, layers=20)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in steps(240):
    rows, labels = batch(64)
    optimizer.zero_grad()
    cross_entropy(model(rows), labels).backward()
    optimizer.step()
