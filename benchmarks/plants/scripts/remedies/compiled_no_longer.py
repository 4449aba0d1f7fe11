"""
cause: program_code
told: hand over as a tensor what differs
"""

import torch
import torch._dynamo
from measured import batch, network, steps
from torch.nn.functional import cross_entropy


class Ramped(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.seen = 0
        # -> self.register_buffer("seen", torch.zeros(()))

    def forward(self, outputs, labels):
        self.seen += 1
        weight = min(1.0, self.seen / 1000)
        # -> weight = (self.seen / 1000).clamp(max=1.0)
        rows = outputs.repeat(200, 1)
        for _ in range(8):
            rows = (rows * weight).abs() - rows
        return cross_entropy(outputs, labels) + 1e-6 * rows.mean()


torch.set_num_threads(1)
torch._dynamo.config.recompile_limit = 2  # usually 8, which compiling takes long for
model = network(width=64)
loss_of = torch.compile(Ramped())
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in steps():
    rows, labels = batch()
    optimizer.zero_grad()
    loss_of(model(rows), labels).backward()
    optimizer.step()
