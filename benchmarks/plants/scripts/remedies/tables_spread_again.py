"""
cause: compute
told: call it once for each input
"""

import torch
from measured import steps
from torch import nn
from torch.nn.functional import logsigmoid

torch.set_num_threads(1)
ROWS = 2_000


class Neighbours(nn.Module):
    """Rows of users and items, of which each is a mean over its neighbours."""

    def __init__(self, graph):
        super().__init__()
        self.graph, self.table = graph, nn.Embedding(ROWS, 64)

    def rows(self):
        seen = torch.sparse.mm(self.graph, self.table.weight)
        return seen + torch.sparse.mm(self.graph, seen)

    def forward(self, user, bought, other):
        rows = self.rows()
        users = rows[user]
        gain = self.rows()[bought] - self.rows()[other]
        # -> gain = rows[bought] - rows[other]
        return (users * gain).sum(1)


edges = torch.randint(ROWS, (2, 40_000))
graph = torch.sparse_coo_tensor(edges, torch.full((40_000,), 0.05), (ROWS, ROWS)).coalesce()
model = Neighbours(graph)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in steps():
    optimizer.zero_grad()
    (-logsigmoid(model(*torch.randint(ROWS, (3, 256)))).mean()).backward()
    optimizer.step()
