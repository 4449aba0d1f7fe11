"""
cause: synchronisation
told: leave the branch on a tensor's value out
device: cuda
"""

import torch
from measured import network, steps
from torch.nn.functional import cross_entropy

device = torch.device("cuda")
model = network(width=512, layers=30).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
rows, labels = torch.randn(2048, 64, device=device), torch.randint(10, (2048,), device=device)
for _ in steps(2000):
    optimizer.zero_grad()
    loss = cross_entropy(model(rows), labels)
    if loss > 20:
        # -> loss = torch.where(loss > 20, loss / 10, loss)
        loss = loss / 10
        # ->
    loss.backward()
    optimizer.step()
