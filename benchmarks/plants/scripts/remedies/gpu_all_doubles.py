"""
cause: compute
told: fp32 for the model
device: cuda
"""

import torch
from measured import network, steps
from torch.nn.functional import cross_entropy

device = torch.device("cuda")
torch.set_float32_matmul_precision("highest")
# -> torch.set_float32_matmul_precision("high")
torch.set_default_dtype(torch.float64)
# ->
model = network(width=2048).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
rows, labels = torch.randn(4096, 64, device=device), torch.randint(10, (4096,), device=device)
for _ in steps(80):
    optimizer.zero_grad()
    cross_entropy(model(rows), labels).backward()
    optimizer.step()
