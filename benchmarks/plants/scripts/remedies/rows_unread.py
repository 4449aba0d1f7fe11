"""
cause: compute
told: sparse=True where the table is made
"""

import torch
from measured import network, steps
from torch import nn
from torch.nn.functional import cross_entropy

torch.set_num_threads(1)
table, model = nn.Embedding(200_000, 64), network(width=256, layers=2)
# -> table, model = nn.Embedding(200_000, 64, sparse=True), network(width=256, layers=2)
of_table = torch.optim.Adam(table.parameters(), fused=True)
# -> of_table = torch.optim.SparseAdam(table.parameters())
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in steps():
    ids, labels = torch.randint(200_000, (256,)), torch.randint(10, (256,))
    optimizer.zero_grad()
    of_table.zero_grad()
    cross_entropy(model(table(ids)), labels).backward()
    optimizer.step()
    of_table.step()
