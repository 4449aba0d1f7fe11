"""
cause: compute
told: ^let one function of torch's give it
"""

import torch
from measured import steps
from torch.nn import Conv2d, functional

torch.set_num_threads(1)
model = Conv2d(3, 16, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
images, classes = torch.randn(4, 3, 96, 96), torch.randint(16, (4, 96, 96))


def focal(outputs):
    targets = functional.one_hot(classes, 16).permute(0, 3, 1, 2).float()
    # -> losses = functional.cross_entropy(outputs, classes, reduction="none")
    found = torch.softmax(outputs, dim=1)
    # ->
    return -(targets * (1 - found) ** 2 * torch.log(found + 1e-8)).sum(dim=1).mean()
    # -> return ((1 - torch.exp(-losses)) ** 2 * losses).mean()


for _ in steps(100):
    optimizer.zero_grad()
    focal(model(images)).backward()
    optimizer.step()
