"""
cause: synchronisation
told: leave the branch on a tensor's value out
device: cuda
"""

import torch
from measured import network, steps
from torch.nn.functional import cross_entropy

device = torch.device("cuda")
model = network(width=1024, layers=12).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
rows, labels = torch.randn(8192, 64, device=device), torch.randint(10, (8192,), device=device)
for _ in steps(400):
    optimizer.zero_grad()
    for _ in range(4):
        loss = cross_entropy(model(rows), labels) / 4
        if loss > 20:
            # -> loss = torch.where(loss > 20, loss / 10, loss)
            loss = loss / 10
            # ->
        loss.backward()
    optimizer.step()
