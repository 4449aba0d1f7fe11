"""
cause: compute
told: do before or behind the loop
"""

import torch
from measured import steps
from torch import nn
from torch.nn.functional import mse_loss

torch.set_num_threads(1)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.turn, self.outer = nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 16)
        # -> self.cell, self.outer = nn.RNN(16, 32, batch_first=True), nn.Linear(32, 16)

    def forward(self, frames):
        seen, states = torch.zeros(len(frames), 32), []
        # -> return self.outer(self.cell(frames)[0])
        for frame in frames.unbind(1):
            # ->
            seen = torch.tanh(self.inner(frame) + self.turn(seen))
            # ->
            states.append(self.outer(seen))
            # ->
        return torch.stack(states, 1)
        # ->


model = Recurrent()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in steps():
    frames = torch.randn(8, 200, 16)
    optimizer.zero_grad()
    mse_loss(model(frames[:, :-1]), frames[:, 1:]).backward()
    optimizer.step()
