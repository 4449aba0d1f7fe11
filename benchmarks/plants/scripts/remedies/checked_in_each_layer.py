"""
cause: program_code
told: check values in one step of N
"""

import torch
from measured import batch, network, steps
from torch import nn
from torch.nn.functional import cross_entropy

torch.set_num_threads(1)


class Checked(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv1d(1, 16, 1), nn.ReLU(), nn.Hardtanh())
        self.head = network(layers=1, features=16)

    def forward(self, rows):
        for layer in self.layers:
            rows = layer(rows)
            assert not torch.isnan(rows).any()
            # ->
            assert not torch.isinf(rows).any()
            # ->
        return self.head(rows.mean(-1))


model = Checked()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
inputs, labels = batch(64, features=300)
for _ in steps(200):
    optimizer.zero_grad()
    cross_entropy(model(inputs[:, None]), labels).backward()
    optimizer.step()
