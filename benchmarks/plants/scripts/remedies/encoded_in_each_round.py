"""
cause: compute
told: call it once for each input
"""

import torch
from measured import batch, network, steps
from torch import nn
from torch.nn.functional import cross_entropy

torch.set_num_threads(1)


class Reader(nn.Module):
    """Reads what was encoded in several rounds, each with the state of the one before."""

    def __init__(self):
        super().__init__()
        self.encoder = network(layers=2, classes=64)
        self.turn, self.head = nn.Linear(64, 64), nn.Linear(64, 10)

    def forward(self, x):
        state, encoded = x, self.encoder(x)
        for _ in range(6):
            encoded = self.encoder(x)
            # ->
            state = torch.tanh(self.turn(state) + encoded)
        return self.head(state)


model = Reader()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in steps():
    x, labels = batch()
    optimizer.zero_grad()
    cross_entropy(model(x), labels).backward()
    optimizer.step()
