"""
cause: synchronisation
told: ^leave the number of
device: cuda
"""

import torch
from measured import network, steps
from torch import nn
from torch.nn.functional import cross_entropy


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.places = network(width=256, layers=40), nn.Embedding(256, 64)

    def forward(self, features):
        places = torch.arange(len(features)).to(features.device)
        # -> places = torch.arange(len(features), device=features.device)
        return self.layers(features + self.places(places))


device = torch.device("cuda")
encoder = network(width=4096, layers=4, classes=64).to(device).requires_grad_(False)
head = Head().to(device)
optimizer = torch.optim.SGD(head.parameters(), lr=0.01, fused=True)
rows, labels = torch.randn(16384, 64, device=device), torch.randint(10, (256,), device=device)
for _ in steps(600):
    optimizer.zero_grad()
    features = encoder(rows).unflatten(0, (256, 64)).mean(1)
    cross_entropy(head(features), labels).backward()
    optimizer.step()
