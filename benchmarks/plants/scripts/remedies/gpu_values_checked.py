"""
cause: synchronisation
told: Distribution.set_default_validate_args\(False\), called once before the loop
device: cuda
"""

import torch
from measured import network, steps
from torch.distributions import Normal

CHECK = True
# -> CHECK = False
device = torch.device("cuda")
model = network(width=1024, layers=12).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
rows, actions = torch.randn(8192, 64, device=device), torch.randn(8192, 10, device=device)
for _ in steps(400):
    optimizer.zero_grad()
    for _ in range(4):
        loss = -Normal(model(rows), 1.0, validate_args=CHECK).log_prob(actions).mean() / 4
        loss.backward()
    optimizer.step()
