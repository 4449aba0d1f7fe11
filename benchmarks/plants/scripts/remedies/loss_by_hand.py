"""
cause: compute
told: ^let one function of torch's give it
"""

import torch
from measured import network, steps
from torch.nn import functional

torch.set_num_threads(1)
model = network(width=128, layers=1, classes=6000)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
rows, labels = torch.randn(256, 64), torch.randint(6000, (256,))


def smoothed(outputs):
    targets = functional.one_hot(labels, 6000) * 0.9 + 0.1 / 6000
    return -(targets * torch.log(torch.softmax(outputs, dim=1) + 1e-9)).sum(dim=1).mean()
    # -> return functional.cross_entropy(outputs, labels, label_smoothing=0.1)


for _ in steps():
    optimizer.zero_grad()
    smoothed(model(rows)).backward()
    optimizer.step()
