"""
cause: compute
told: compute it once
"""

import torch
from measured import steps
from torch import nn
from torch.nn.functional import cross_entropy

torch.set_num_threads(1)


def normalized(links):
    links = links + torch.eye(len(links))
    scale = links.sum(1).rsqrt()
    return scale[:, None] * links * scale


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(64, 32), nn.Linear(32, 10)

    def forward(self, x, links):
        links = normalized(links)
        # ->
        return self.outer(links @ self.inner(x).relu())


links, rows = (torch.rand(2000, 2000) < 0.01).float(), torch.randn(2000, 64)
# -> links, rows = normalized((torch.rand(2000, 2000) < 0.01).float()), torch.randn(2000, 64)
labels, model = torch.randint(10, (2000,)), Network()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in steps():
    optimizer.zero_grad()
    cross_entropy(model(rows, links), labels).backward()
    optimizer.step()
