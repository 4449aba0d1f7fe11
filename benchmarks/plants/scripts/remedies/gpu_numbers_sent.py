"""
cause: synchronisation
told: ^leave the number of
device: cuda
"""

import torch
from measured import network, steps
from torch.nn.functional import cross_entropy

device = torch.device("cuda")
encoder = network(width=4096, layers=4, classes=64).to(device).requires_grad_(False)
head = network(width=256, layers=40).to(device)
optimizer = torch.optim.SGD(head.parameters(), lr=0.01, fused=True)
rows, labels = torch.randn(16384, 64, device=device), torch.randint(10, (256,), device=device)
for step in steps(600):
    optimizer.zero_grad()
    features = encoder(rows).unflatten(0, (256, 64)).mean(1)
    temperature = torch.tensor(1.0 + 0.001 * step, device=device)
    # -> temperature = 1.0 + 0.001 * step
    loss = cross_entropy(head(features) / temperature, labels)
    loss.backward()
    optimizer.step()
