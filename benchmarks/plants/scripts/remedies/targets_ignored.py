"""
cause: compute
told: choose the positions before the product. x\[targets != ignore_index\] goes into the layer
"""

import torch
from measured import steps
from torch import nn
from torch.nn.functional import cross_entropy

torch.set_num_threads(1)


class Answers(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.body = nn.Embedding(4000, 96), nn.GRU(96, 96, batch_first=True)
        self.head = nn.Linear(96, 4000)

    def forward(self, ids, targets):
        seen, _ = self.body(self.table(ids))
        # -> known = targets != -100
        # -> seen, targets = self.body(self.table(ids))[0][known], targets[known]
        found = self.head(seen)
        return cross_entropy(found.flatten(0, -2), targets.flatten(), ignore_index=-100)


model = Answers()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in steps():
    ids = torch.randint(4000, (16, 40))
    targets = ids.clone()
    targets[:, :32] = -100
    optimizer.zero_grad()
    model(ids, targets).backward()
    optimizer.step()
