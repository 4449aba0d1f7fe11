"""
cause: compute
told: where few rows of a step differ; else fused=True|SparseAdam for it alone
"""

import torch
from measured import network, steps
from torch import nn
from torch.nn.functional import cross_entropy

torch.set_num_threads(1)
table, model = nn.Embedding(150_000, 64), network(width=64, layers=2)
# -> table, model = nn.Embedding(150_000, 64, sparse=True), network(width=64, layers=2)
of_table = torch.optim.Adam(table.parameters())
# -> of_table = torch.optim.SparseAdam(table.parameters())
optimizer = torch.optim.Adam(model.parameters())
for _ in steps():
    ids, labels = (torch.rand(512, 64) ** 3 * 150_000).long(), torch.randint(10, (512,))
    optimizer.zero_grad()
    of_table.zero_grad()
    cross_entropy(model(table(ids).mean(1)), labels).backward()
    optimizer.step()
    of_table.step()
