"""
cause: program_code
told: with torch's functions on whole tensors in place of Python
"""

import torch
from measured import steps
from torch import nn
from torch.nn.functional import cross_entropy

torch.set_num_threads(1)
side = 96


class Placed(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(5, 4, 3, 2), nn.ReLU(), nn.Flatten(), nn.LazyLinear(10))

    def forward(self, images):
        rows = torch.tensor([[place / side for _ in range(side)] for place in range(side)])
        # -> rows = (torch.arange(side) / side)[:, None].expand(side, side)
        columns = torch.tensor([[place / side for place in range(side)] for _ in range(side)])
        # -> columns = rows.T
        places = torch.stack([rows, columns]).expand(len(images), -1, -1, -1)
        return self.body(torch.cat([images, places], 1))


model = Placed()
model(torch.randn(1, 3, side, side))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in steps(150):
    images, labels = torch.randn(4, 3, side, side), torch.randint(10, (4,))
    optimizer.zero_grad()
    cross_entropy(model(images), labels).backward()
    optimizer.step()
