"""
cause: compute
told: compute it once for each update
"""

import torch
from measured import steps
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.utils.parametrizations import weight_norm

torch.set_num_threads(1)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(16, 384), nn.Linear(384, 16)
        self.turn = weight_norm(nn.Linear(384, 384, bias=False))

    def forward(self, frames):
        seen = torch.zeros(len(frames), 384)
        for frame in frames.unbind(1):
            seen = torch.tanh(self.inner(frame) + self.turn(seen))
        return self.outer(seen)


model = Recurrent()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in steps():
    frames = torch.randn(8, 25, 16)
    optimizer.zero_grad()
    with torch.enable_grad():
        # -> with nn.utils.parametrize.cached():
        mse_loss(model(frames[:, :-1]), frames[:, -1]).backward()
    optimizer.step()
