"""
cause: program_code
told: "where it depends on nothing that changes"
"""

import torch
from measured import network, steps
from torch import nn

torch.set_num_threads(1)
NODES = 2_000


class Graph(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = network(width=32, layers=2)
        self.edges = None

    def forward(self, x, pairs):
        edges = torch.unique(torch.cat([pairs, pairs.flip(0)], 1), dim=1)
        # -> if self.edges is None:
        # ->     self.edges = torch.unique(torch.cat([pairs, pairs.flip(0)], 1), dim=1)
        # -> edges = self.edges
        return torch.zeros(NODES, 10).index_add(0, edges[0], self.layers(x)[edges[1]])


model, given = Graph(), torch.randint(0, NODES, (2, 6_000))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in steps(60):
    optimizer.zero_grad()
    model(torch.randn(NODES, 64), given).square().mean().backward()
    optimizer.step()
