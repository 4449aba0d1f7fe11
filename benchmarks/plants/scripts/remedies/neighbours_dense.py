"""
cause: compute
told: to_sparse_csr\(\) of that matrix once
"""

import torch
from measured import steps
from torch import nn
from torch.nn.functional import cross_entropy

torch.set_num_threads(1)


class Graph(nn.Module):
    def __init__(self, neighbours):
        super().__init__()
        self.register_buffer("neighbours", neighbours)
        # -> self.register_buffer("neighbours", neighbours.to_sparse_csr())
        self.inner, self.outer = nn.Linear(64, 64), nn.Linear(64, 7)

    def forward(self, nodes):
        seen = torch.relu(self.neighbours @ self.inner(nodes))
        # -> seen = torch.relu(torch.sparse.mm(self.neighbours, self.inner(nodes)))
        return self.neighbours @ self.outer(seen)
        # -> return torch.sparse.mm(self.neighbours, self.outer(seen))


neighbours = torch.eye(1500)
neighbours[torch.randint(1500, (6000,)), torch.randint(1500, (6000,))] = 1.0
model = Graph(neighbours / neighbours.sum(1, keepdim=True))
nodes, labels = torch.randn(1500, 64), torch.randint(7, (1500,))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01, fused=True)
for _ in steps():
    optimizer.zero_grad()
    cross_entropy(model(nodes), labels).backward()
    optimizer.step()
