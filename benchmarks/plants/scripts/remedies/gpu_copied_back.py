"""
cause: copy|synchronisation
told: let what needs these tensors work on the device, without cpu\(\) and numpy\(\)
device: cuda
"""

import torch
from measured import network, place, steps
from torch.nn.functional import cross_entropy

device = place()
model = network(width=2048, layers=4, classes=2048).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
rows, labels = torch.randn(8192, 64, device=device), torch.randint(2048, (8192,), device=device)
seen = torch.zeros(2048)
# -> seen = torch.zeros(2048, device=device)
for _ in steps(300):
    optimizer.zero_grad()
    scores = model(rows)
    cross_entropy(scores, labels).backward()
    optimizer.step()
    seen += scores.detach().cpu()[:, ::64].sum()
    # -> seen += scores.detach()[:, ::64].sum()
