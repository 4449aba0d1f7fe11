"""
cause: compute
told: multiply with the weights first, .* at .*products_in_order.py:\d+
"""

import torch
from measured import steps
from torch import nn
from torch.nn.functional import cross_entropy

torch.set_num_threads(1)
NODES, WIDE = 2000, 512
edges = torch.randint(NODES, (2, 32 * NODES))
neighbours = torch.sparse_coo_tensor(edges, torch.ones(32 * NODES), (NODES, NODES)).coalesce().to_sparse_csr()


class Convolution(nn.Module):
    def __init__(self, given, gives):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(given, gives) / given**0.5)

    def forward(self, x):
        return (neighbours @ x) @ self.weight
        # -> return neighbours @ (x @ self.weight)


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Convolution(WIDE, 32), Convolution(32, 10)

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))


model = Network()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
features, labels = torch.randn(NODES, WIDE), torch.randint(10, (NODES,))
for step in steps(150):
    x = features.roll(step, 0)
    optimizer.zero_grad()
    cross_entropy(model(x), labels).backward()
    optimizer.step()
