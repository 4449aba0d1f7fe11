"""
cause: compute
told: ^let one function of torch's give it
device: cuda
"""

import torch
from measured import steps
from torch import nn
from torch.nn import functional

device, classes = torch.device("cuda"), 64
model = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, classes, 1)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
images = torch.randn(16, 3, 256, 256, device=device)
labels = torch.randint(classes, (16, 256, 256), device=device)


def focal(outputs):
    targets = functional.one_hot(labels, classes).permute(0, 3, 1, 2).float()
    # -> losses = functional.cross_entropy(outputs, labels, reduction="none")
    found = torch.softmax(outputs, dim=1)
    # ->
    return -(targets * (1 - found) ** 2 * torch.log(found + 1e-8)).sum(dim=1).mean()
    # -> return ((1 - torch.exp(-losses)) ** 2 * losses).mean()


for _ in steps(80):
    optimizer.zero_grad()
    focal(model(images)).backward()
    optimizer.step()
