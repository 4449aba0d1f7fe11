"""
cause: launch_bound
told: ^larger micro-batches
device: cuda
"""

import torch
from measured import network, steps
from torch.nn.functional import cross_entropy

device = torch.device("cuda")
model = network(layers=12).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
rows, labels = torch.randn(512, 64, device=device), torch.randint(10, (512,), device=device)
calls = 16
# -> calls = 1
for _ in steps(200):
    optimizer.zero_grad()
    for some, of_some in zip(rows.chunk(calls), labels.chunk(calls), strict=True):
        (cross_entropy(model(some), of_some) / calls).backward()
    optimizer.step()
