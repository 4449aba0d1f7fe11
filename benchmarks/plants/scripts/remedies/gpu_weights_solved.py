"""
cause: compute
told: compute it once for each update
device: cuda
"""

import torch
from measured import place, steps
from torch import nn
from torch.nn.functional import gelu, mse_loss
from torch.nn.utils.parametrizations import orthogonal


class Iterated(nn.Module):
    """One layer that is applied until its state settles, with a rotation of the state."""

    def __init__(self, width=640):
        super().__init__()
        self.inner, self.outer = nn.Linear(64, width), nn.Linear(width, 64)
        self.turn = orthogonal(nn.Linear(width, width, bias=False), orthogonal_map="cayley")
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, rows):
        given = self.inner(rows)
        state = torch.zeros_like(given)
        for _ in range(10):
            state = self.turn(state) + given
            state = state + self.down(gelu(self.up(state)))
        return self.outer(state)


device = place()
model = Iterated().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
for _ in steps(120):
    rows = torch.randn(4096, 64, device=device)
    optimizer.zero_grad()
    with torch.enable_grad():
        # -> with nn.utils.parametrize.cached():
        mse_loss(model(rows), rows).backward()
    optimizer.step()
