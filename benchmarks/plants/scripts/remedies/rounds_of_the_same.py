"""
cause: compute|program_code
told: make fewer rounds of the loop
"""

import torch
from measured import network, steps

torch.set_num_threads(1)
torch.manual_seed(1)
model = network(width=64, layers=1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
inputs, targets = torch.randn(64, 64), torch.randn(64, 10)
num_rounds = 80
# -> num_rounds = 2


def transport(given, wanted):
    """Sinkhorn's rounds."""
    costs = torch.cdist(given, wanted)
    rows, columns = torch.zeros(len(given)), torch.zeros(len(wanted))
    for _ in range(num_rounds):
        rows = -torch.logsumexp(columns[None] - costs, 1)
        columns = -torch.logsumexp(rows[:, None] - costs, 0)
    return ((rows[:, None] + columns[None] - costs).exp() * costs).sum()


for _ in steps(80):
    optimizer.zero_grad()
    transport(model(inputs), targets).backward()
    optimizer.step()
