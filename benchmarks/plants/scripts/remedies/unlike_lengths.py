"""
cause: compute
told: put rows of like length into one batch
"""

import torch
from measured import steps
from torch import nn
from torch.nn.functional import cross_entropy

torch.set_num_threads(1)


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.body = (
            nn.Embedding(500, 64),
            nn.TransformerEncoderLayer(64, 4, 256, batch_first=True),
        )
        self.head = nn.Linear(64, 500)

    def forward(self, ids):
        return self.head(self.body(self.table(ids)))


model = Words()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in steps():
    lengths = (8 + torch.rand(64).pow(4) * 120).long()[:16]
    # -> lengths = (8 + torch.rand(64).pow(4) * 120).long().sort().values[16 * _ % 64 :][:16]
    ids = torch.zeros(16, int(lengths.max()), dtype=torch.long)
    for row, length in zip(ids, lengths, strict=True):
        row[:length] = torch.randint(1, 500, (int(length),))
    optimizer.zero_grad()
    cross_entropy(model(ids).flatten(0, 1), ids.flatten(), ignore_index=0).backward()
    optimizer.step()
