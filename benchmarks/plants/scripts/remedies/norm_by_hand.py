"""
cause: compute
told: torch.compile the function or the model to join them
"""

import torch
from measured import steps
from torch import nn

torch.set_num_threads(1)


def normalized(x):
    centred = x - x.mean(-1, keepdim=True)
    return centred * (centred.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    # -> return nn.functional.layer_norm(x, x.shape[-1:])


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(64, 64)

    def forward(self, x):
        return normalized(self.inner(x))


model = nn.Sequential(*(Layer() for _ in range(4)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in steps():
    optimizer.zero_grad()
    model(torch.randn(16384, 64)).square().mean().backward()
    optimizer.step()
