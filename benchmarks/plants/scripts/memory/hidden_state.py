import torch
from model import SIZE, setup
from torch import nn

device = setup()
cell = nn.GRUCell(256, 256).to(device)
readout = nn.Linear(256, 16).to(device)
optimizer = torch.optim.SGD([*cell.parameters(), *readout.parameters()], lr=1e-3)
state = torch.zeros(128 * SIZE, 256, device=device)
for _ in range(4000):
    x = torch.randn(128 * SIZE, 256, device=device)
    state = cell(x, state)  # LINE
    loss = readout(state.detach()).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
