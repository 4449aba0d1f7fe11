"""
cause: compute|launch_bound
told: "work on all at once: stack what the loop"
device: cuda
"""

import torch
from measured import place, steps
from torch import nn

device = place()


class Samples(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(64, 64)

    def forward(self, rows):
        seen = []
        # -> hidden = self.inner(rows)
        for row in rows:
            # -> hidden = torch.relu(hidden - hidden.mean(dim=1, keepdim=True))
            hidden = self.inner(row)
            # ->
            hidden = torch.relu(hidden - hidden.mean(dim=0, keepdim=True))
            # ->
            seen.append((hidden * hidden).sum() / (1 + hidden.sum()))
            # ->
        return torch.stack(seen)
        # -> return (hidden * hidden).sum(dim=(1, 2)) / (1 + hidden.sum(dim=(1, 2)))


model = Samples().to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.001, fused=True)
rows = torch.randn(100, 32, 64, device=device)
for _ in steps(160):
    optimizer.zero_grad()
    model(rows).mean().backward()
    optimizer.step()
