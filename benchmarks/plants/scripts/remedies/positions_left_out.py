"""
cause: compute
told: choose what is read before the product, not behind it
"""

import torch
from measured import steps
from torch import nn
from torch.nn.functional import cross_entropy

torch.set_num_threads(1)


class Next(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.body = nn.Embedding(2000, 96), nn.GRU(96, 96, batch_first=True)
        self.head = nn.Linear(96, 2000)

    def forward(self, ids):
        seen, _ = self.body(self.table(ids))
        return self.head(seen)[:, -1]
        # -> return self.head(seen[:, -1])


model = Next()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in steps():
    ids = torch.randint(2000, (16, 33))
    optimizer.zero_grad()
    cross_entropy(model(ids[:, :-1]), ids[:, -1]).backward()
    optimizer.step()
