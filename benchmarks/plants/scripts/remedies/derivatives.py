"""
cause: compute
told: one torch.autograd.grad\(output, \[x, y, ...\]\) for all inputs of an output
"""

import torch
from measured import steps
from torch import nn

torch.set_num_threads(1)


def derivatives(output, x, y, t):
    ones = torch.ones_like(output)
    by_x = torch.autograd.grad(output, x, ones, create_graph=True)[0]
    # -> return torch.autograd.grad(output, [x, y, t], ones, create_graph=True)
    by_y = torch.autograd.grad(output, y, ones, create_graph=True)[0]
    # ->
    by_t = torch.autograd.grad(output, t, ones, create_graph=True)[0]
    # ->
    return by_x, by_y, by_t
    # ->


class Field(nn.Module):
    def __init__(self):
        super().__init__()
        sizes = [3, 128, 128, 128, 128, 1]
        layers = [(nn.Linear(a, b), nn.Tanh()) for a, b in zip(sizes, sizes[1:], strict=False)]
        self.layers = nn.Sequential(*[one for pair in layers for one in pair][:-1])

    def forward(self, x, y, t):
        return self.layers(torch.cat([x, y, t], dim=1))


model = Field()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for _ in steps(150):
    x, y, t = (torch.rand(2048, 1, requires_grad=True) for _ in range(3))
    u = model(x, y, t)
    u_x, u_y, u_t = derivatives(u, x, y, t)
    loss = (u_t + u * (u_x + u_y)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
