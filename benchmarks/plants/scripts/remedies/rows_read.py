"""
cause: program_code
told: "work on all rows at once in place of the loop"
"""

import torch
from measured import network, steps
from torch import nn

torch.set_num_threads(1)


class Spans(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = network(width=32, layers=1)

    def forward(self, x, lengths):
        means = []
        # -> kept = torch.arange(x.shape[1]) < lengths[:, None]
        for row, length in zip(x, lengths, strict=True):
            # ->
            end = length.item()
            # ->
            means.append(row[:end].mean(0))
            # ->
        return self.head(torch.stack(means))
        # -> return self.head((x * kept[..., None]).sum(1) / lengths[:, None])


model = Spans()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in steps(120):
    optimizer.zero_grad()
    model(torch.randn(384, 12, 64), torch.randint(1, 12, (384,))).square().mean().backward()
    optimizer.step()
