"""
cause: compute
told: parametrize.cached\(\) around the forward pass
"""

import contextlib

import torch
from measured import steps
from torch import nn
from torch.nn.utils import parametrizations, parametrize

torch.set_num_threads(1)
shared = {"each": contextlib.nullcontext, "once": parametrize.cached}
once = shared["each"]
# -> once = shared["once"]


def layer(given, gives):
    return parametrizations.weight_norm(nn.Linear(given, gives))


model = nn.Sequential(layer(64, 256), nn.SiLU(), layer(256, 256), nn.SiLU(), layer(256, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
for _ in steps(500):
    state, loss = torch.randn(16, 64), 0.0
    optimizer.zero_grad()
    with once():
        for _ in range(24):
            state = state + 0.1 * model(state)
            loss = loss + state.square().mean()
    loss.backward()
    optimizer.step()
