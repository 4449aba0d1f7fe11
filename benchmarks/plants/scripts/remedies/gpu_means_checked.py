"""
cause: synchronisation
told: the wait is within the library that \w+(\.\w+)?\(\), gpu_means_checked.py:\d+ calls
device: cuda
library: torchmetrics
"""

import torch
from measured import network, place, steps
from torch.nn.functional import cross_entropy
from torchmetrics import MeanMetric

CHECK = "warn"
# -> CHECK = "disable"
device = place()
model = network(width=1024, layers=12).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
losses = MeanMetric(nan_strategy=CHECK).to(device)
rows, labels = torch.randn(8192, 64, device=device), torch.randint(10, (8192,), device=device)


def train():
    optimizer.zero_grad()
    for _ in range(4):
        loss = cross_entropy(model(rows), labels) / 4
        losses.update(loss.detach())
        loss.backward()
    optimizer.step()


for _ in steps(400):
    train()
print(losses.compute())
