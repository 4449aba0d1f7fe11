"""
cause: compute
told: make \S+ a multiple of 64, \S+. of a vocabulary by rows that no token uses
device: cuda
"""

import torch
from measured import place, steps
from torch import nn
from torch.nn.functional import cross_entropy

device = place()
VOCABULARY = 50257
# -> VOCABULARY = 50304


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, 1024)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(1024), nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024))
            for _ in range(8)
        )
        self.head = nn.Linear(1024, VOCABULARY, bias=False)

    def forward(self, ids):
        hidden = self.table(ids)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.head(hidden)


model = Words().to(device, torch.bfloat16)
optimizer = torch.optim.SGD(model.parameters(), lr=0.001, fused=True)
ids = torch.randint(50257, (8192,), device=device)
for _ in steps(120):
    optimizer.zero_grad()
    cross_entropy(model(ids), ids.roll(1)).backward()
    optimizer.step()
