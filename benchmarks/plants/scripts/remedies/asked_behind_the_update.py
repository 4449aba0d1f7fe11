"""
cause: between_steps
told: take what it finds from the outputs of the pass that trains
"""

import torch
from measured import network, steps
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)


def share_right(outputs, labels):
    return (outputs.argmax(1) == labels).float().mean().item()


model = network()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
rows, labels = torch.randn(60 * 256, 64), torch.randint(10, (60 * 256,))
loader = DataLoader(TensorDataset(rows, labels), batch_size=256)
for _, (x, y) in zip(steps(), loader, strict=False):
    outputs = model(x)
    optimizer.zero_grad()
    cross_entropy(outputs, y).backward()
    optimizer.step()
    share_right(model(x), y)
    # -> share_right(outputs.detach(), y)
