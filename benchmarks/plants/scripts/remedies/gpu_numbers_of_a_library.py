"""
cause: synchronisation
told: ^give the distribution of
device: cuda
"""

import torch
from measured import network, steps
from torch.distributions import Normal

device = torch.device("cuda")
encoder = network(width=4096, layers=4, classes=64).to(device).requires_grad_(False)
head = network(width=256, layers=40).to(device)
optimizer = torch.optim.SGD(head.parameters(), lr=0.01, fused=True)
rows, actions = torch.randn(16384, 64, device=device), torch.randn(256, 10, device=device)
scale = 1.0
# -> scale = torch.ones(10, device=device)
for _ in steps(600):
    optimizer.zero_grad()
    means = head(encoder(rows).unflatten(0, (256, 64)).mean(1))
    loss = -Normal(means, scale, validate_args=False).log_prob(actions).mean()
    loss.backward()
    optimizer.step()
