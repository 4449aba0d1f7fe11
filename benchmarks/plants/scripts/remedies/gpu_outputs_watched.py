"""
cause: program_code
told: do what .*gpu_outputs_watched.py:\d+ does in one step of N where it only watches
device: cuda
"""

import torch
from measured import steps
from torch import nn

device, num = torch.device("cuda"), 0
layers = [one for _ in range(8) for one in (nn.Linear(512, 512), nn.ReLU())]
model = nn.Sequential(*layers).to(device, torch.bfloat16)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
x = torch.randn(65536, 512, device=device, dtype=torch.bfloat16)
seen = {}


def watch(module, inputs, outputs):
    values = outputs.detach().float()
    # -> values = outputs.detach().float() if num % 50 == 0 else torch.zeros(2, device=device)
    seen[module] = values.mean(), values.std(), values.abs().max()


for layer in layers:
    layer.register_forward_hook(watch)
for num in steps(120):  # noqa: B007
    optimizer.zero_grad()
    model(x).float().square().mean().backward()
    optimizer.step()
