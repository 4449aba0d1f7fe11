"""
cause: compute
told: compute it once for each sample
"""

import torch
from measured import network, steps
from torch.nn.functional import cross_entropy

torch.set_num_threads(1)

frozen = network(classes=64).requires_grad_(False).eval()
model = network()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
samples, labels = torch.randn(600, 64), torch.randint(10, (600,))
# -> samples, labels = frozen(torch.randn(600, 64)), torch.randint(10, (600,))


def seen_by_the_encoder(rows):
    with torch.no_grad():
        return frozen(rows)


for _ in steps():
    chosen = torch.randperm(600)[:128]
    rows = seen_by_the_encoder(samples[chosen])
    # -> rows = samples[chosen]
    optimizer.zero_grad()
    cross_entropy(model(rows), labels[chosen]).backward()
    optimizer.step()
