"""
cause: program_code
told: work on all rows at once in place of the loops
"""

import torch
from measured import network, steps

torch.set_num_threads(1)
model = network(width=64, layers=1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
inputs, kinds = torch.randn(72, 64), torch.randint(4, (72,))


def in_loops(given):
    total = torch.zeros(())
    for one, kind in zip(given, kinds.tolist(), strict=True):
        for other, its_kind in zip(given, kinds.tolist(), strict=True):
            apart = (one - other).square().sum()
            total = total + (apart if kind == its_kind else torch.relu(1 - apart))
    return total / len(given) ** 2


def at_once(given):
    apart = (given[:, None] - given).square().sum(-1)
    return torch.where(kinds[:, None] == kinds, apart, torch.relu(1 - apart)).mean()


for _ in steps(28):
    optimizer.zero_grad()
    loss = in_loops(model(inputs))
    # -> loss = at_once(model(inputs))
    loss.backward()
    optimizer.step()
