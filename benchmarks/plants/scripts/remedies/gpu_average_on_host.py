"""
cause: program_code|copy|synchronisation
told: 'keep on the device what .* has on the host|let what needs these tensors work on the device'
device: cuda
"""

import torch
from measured import network, place, steps
from torch.nn.functional import cross_entropy

device = place()
model = network(width=1024, layers=24).to(device)
averaged = [value.detach().cpu() for value in model.parameters()]
# -> averaged = [value.detach().clone() for value in model.parameters()]
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
rows, labels = torch.randn(512, 64, device=device), torch.randint(10, (512,), device=device)


def update(weights):
    for mean, value in zip(averaged, weights, strict=True):
        mean.lerp_(value.detach().to(mean.device), 0.01)


for _ in steps(150):
    optimizer.zero_grad()
    cross_entropy(model(rows), labels).backward()
    optimizer.step()
    with torch.no_grad():
        update(model.parameters())
