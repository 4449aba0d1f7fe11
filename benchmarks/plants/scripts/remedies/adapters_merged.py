"""
cause: compute
told: multiply with the factors one after the other
"""

import torch
from measured import batch, network, steps
from torch import nn
from torch.nn.functional import cross_entropy, linear

torch.set_num_threads(1)


class Adapted(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.weight = nn.Parameter(base.weight.detach(), requires_grad=False)
        rows, columns = base.weight.shape
        self.down, self.up = nn.Parameter(torch.randn(4, columns)), nn.Parameter(torch.zeros(rows, 4))

    def forward(self, x):
        return linear(x, self.weight + self.up @ self.down)
        # -> return linear(x, self.weight) + linear(linear(x, self.down), self.up)


layers = [Adapted(one) if isinstance(one, nn.Linear) else one for one in network(width=768)]
model = nn.Sequential(*layers)
optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.01)
for _ in steps():
    rows, labels = batch(128)
    optimizer.zero_grad()
    cross_entropy(model(rows), labels).backward()
    optimizer.step()
