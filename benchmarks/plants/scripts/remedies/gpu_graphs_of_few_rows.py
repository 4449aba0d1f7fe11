"""
cause: launch_bound|optimizer
told: larger micro-batches. TORCH_LOGS=cudagraphs,graph_breaks
device: cuda
"""

import torch
from measured import network, place, steps
from torch.nn.functional import cross_entropy

ROWS = 64
# -> ROWS = 512
device = place()
model = torch.compile(network(width=64, layers=24).to(device), mode="reduce-overhead")
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
rows, labels = torch.randn(ROWS, 64, device=device), torch.randint(10, (ROWS,), device=device)
for _ in steps(600, work=ROWS / 64):
    optimizer.zero_grad()
    cross_entropy(model(rows), labels).backward()
    optimizer.step()
