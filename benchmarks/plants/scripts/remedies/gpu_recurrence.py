"""
cause: compute|launch_bound
told: the rest as one call of torch.nn.GRU, LSTM or RNN
device: cuda
"""

import torch
from measured import place, steps
from torch import nn
from torch.nn.functional import mse_loss

device = place()


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.turn, self.outer = nn.Linear(16, 128), nn.Linear(128, 128), nn.Linear(128, 16)
        self.whole = nn.RNN(16, 128, batch_first=True)

    def forward(self, frames):
        seen, states = torch.zeros(len(frames), 128, device=frames.device), []
        # ->
        for frame in frames.unbind(1):
            # ->
            seen = torch.tanh(self.inner(frame) + self.turn(seen))
            # ->
            states.append(seen)
            # ->
        return self.outer(torch.stack(states, 1))
        # -> return self.outer(self.whole(frames)[0])


model = Recurrent().to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
frames = torch.randn(64, 120, 16, device=device)
for _ in steps(160):
    optimizer.zero_grad()
    mse_loss(model(frames[:, :-1]), frames[:, 1:]).backward()
    optimizer.step()
