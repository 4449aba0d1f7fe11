"""
cause: program_code|between_steps
told: draw on the device, with device=
device: cuda
"""

import torch
from measured import network, place, steps
from torch.nn.functional import mse_loss

device = place()
images = torch.randn(512, 4096, device=device)
model = network(width=4096, layers=4, features=4096, classes=4096).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.0001, fused=True)


def noised(clean):
    noise = torch.randn(clean.shape).to(clean.device)
    # -> noise = torch.randn(clean.shape, device=clean.device)
    return clean + noise, noise


for _ in steps(300):
    rows, noise = noised(images)
    optimizer.zero_grad()
    mse_loss(model(rows), noise).backward()
    optimizer.step()
