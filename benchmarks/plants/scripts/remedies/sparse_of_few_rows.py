"""
cause: optimizer
told: leave sparse=True of the table out
"""

import torch
from measured import network, steps
from torch import nn
from torch.nn.functional import cross_entropy

torch.set_num_threads(1)
table, model = nn.Embedding(2_000, 64, sparse=True), network(width=64, layers=1)
# -> table, model = nn.Embedding(2_000, 64), network(width=64, layers=1)
of_table = torch.optim.SparseAdam(table.parameters())
# -> of_table = torch.optim.Adam(table.parameters(), fused=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in steps(150):
    ids, labels = torch.randint(2_000, (64, 128)), torch.randint(10, (64,))
    optimizer.zero_grad()
    of_table.zero_grad()
    cross_entropy(model(table(ids).mean(1)), labels).backward()
    optimizer.step()
    of_table.step()
