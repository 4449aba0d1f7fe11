"""
cause: compute
told: ^torch.use_deterministic_algorithms\(False\)
device: cuda
"""

import os

import torch
from measured import network, steps
from torch.nn.functional import interpolate, mse_loss

os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
torch.use_deterministic_algorithms(True)
# ->
device = torch.device("cuda")
model = network(layers=2, classes=64 * 64).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
rows, maps = torch.randn(256, 64, device=device), torch.randn(8, 32, 256, 256, device=device)
for _ in steps(120):
    optimizer.zero_grad()
    coarse = model(rows).view(8, 32, 64, 64)
    mse_loss(interpolate(coarse, scale_factor=4, mode="bilinear"), maps).backward()
    optimizer.step()
