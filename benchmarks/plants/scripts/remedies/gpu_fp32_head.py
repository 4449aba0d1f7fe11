"""
cause: compute
told: let the module that leaves autocast .* multiply in bf16
device: cuda
"""

import torch
from measured import network, place, steps
from torch import nn
from torch.nn.functional import cross_entropy

torch.set_float32_matmul_precision("highest")
device = place()


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = network(width=2048, layers=10, features=512, classes=2048)
        self.head = nn.Linear(2048, 8192)

    def forward(self, rows):
        hidden = self.trunk(rows)
        with torch.autocast("cuda", enabled=False):
            # -> with torch.autocast("cuda", torch.bfloat16):
            return self.head(hidden.float())


model = Classifier().to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
rows, labels = torch.randn(4096, 512, device=device), torch.randint(8192, (4096,), device=device)
for _ in steps(160):
    optimizer.zero_grad()
    with torch.autocast("cuda", torch.bfloat16):
        loss = cross_entropy(model(rows), labels)
    loss.backward()
    optimizer.step()
