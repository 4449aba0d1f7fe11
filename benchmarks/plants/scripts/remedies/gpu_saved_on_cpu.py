"""
cause: copy|synchronisation
told: leave save_on_cpu.. out
device: cuda
"""

import torch
from measured import network, place, steps
from torch.autograd.graph import save_on_cpu
from torch.nn.functional import cross_entropy

device = place()
model = network(width=1024, layers=8).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
rows, labels = torch.randn(1024, 64, device=device), torch.randint(10, (1024,), device=device)
for _ in steps(120):
    optimizer.zero_grad()
    with save_on_cpu():
        # -> with torch.enable_grad():
        loss = cross_entropy(model(rows), labels)
    loss.backward()
    optimizer.step()
