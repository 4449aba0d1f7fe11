"""
cause: memory
told: leave .*(gpu_cache_emptied.py:\d+|empty_cache\(\)) out of the loop
device: cuda
"""

import torch
from measured import network, steps
from torch.nn.functional import cross_entropy

device = torch.device("cuda")
model = network(width=2048, layers=3).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
rows, labels = torch.randn(8192, 64, device=device), torch.randint(10, (8192,), device=device)
for _ in steps(600):
    optimizer.zero_grad()
    cross_entropy(model(rows), labels).backward()
    optimizer.step()
    torch.cuda.empty_cache()
    # ->
