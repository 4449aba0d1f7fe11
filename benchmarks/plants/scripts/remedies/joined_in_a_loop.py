"""
cause: compute
told: collect the parts in a list
"""

import torch
from measured import steps
from torch import nn
from torch.nn.functional import cross_entropy

torch.set_num_threads(1)


class Windows(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(64, 256), nn.Linear(256, 10)

    def forward(self, x):
        states = x.new_zeros(0, 256)
        # -> states = []
        for part in x.split(256):
            states = torch.cat([states, self.layer(part)])
            # -> states.append(self.layer(part))
        return self.head(states)
        # -> return self.head(torch.cat(states))


model = Windows()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
x, labels = torch.randn(40 * 256, 64), torch.randint(10, (40 * 256,))
for _ in steps():
    optimizer.zero_grad()
    cross_entropy(model(x), labels).backward()
    optimizer.step()
