"""
cause: program_code
told: ^leave max_norm= of the embedding out
"""

import torch
from measured import steps
from torch import nn
from torch.nn.functional import normalize

torch.set_num_threads(1)


class Pairs(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(20_000, 64, max_norm=1.0, sparse=True)
        # -> self.table = nn.Embedding(20_000, 64, sparse=True)

    def forward(self, left, right):
        left, right = self.table(left), self.table(right)
        return (normalize(left, dim=-1) * normalize(right, dim=-1)).sum(-1)


model = Pairs()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in steps(150):
    left, right = torch.randint(20_000, (2, 4096))
    optimizer.zero_grad()
    (1 - model(left, right)).mean().backward()
    optimizer.step()
