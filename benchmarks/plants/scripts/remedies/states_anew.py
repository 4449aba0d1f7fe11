"""
cause: between_steps|program_code
told: once, before the loop that has
"""

import copy

import torch
from measured import steps
from torch import nn
from torch.nn.functional import cross_entropy

torch.set_num_threads(1)
layers = [one for _ in range(30) for one in (nn.Linear(64, 64), nn.ReLU())]
model = nn.Sequential(*layers, nn.Linear(64, 10))
average = copy.deepcopy(model)


@torch.no_grad()
def follow():
    new = model
    # -> new = model.state_dict()
    average.load_state_dict(
        {
            name: 0.99 * value + 0.01 * new.state_dict()[name]
            # -> name: 0.99 * value + 0.01 * new[name]
            for name, value in average.state_dict().items()
        }
    )


optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in steps(200):
    rows, labels = torch.randn(256, 64), torch.randint(10, (256,))
    optimizer.zero_grad()
    cross_entropy(model(rows), labels).backward()
    optimizer.step()
    follow()
