"""
cause: program_code
told: leave torch.backends.mkldnn.enabled = False out
"""

import torch
from measured import steps
from torch import nn
from torch.nn.functional import cross_entropy

torch.set_num_threads(1)
torch.backends.mkldnn.set_flags(False)
# ->
model = nn.Sequential(
    nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.ReLU(), nn.Flatten(), nn.Linear(25088, 10)
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in steps():
    optimizer.zero_grad()
    cross_entropy(model(torch.randn(16, 3, 32, 32)), torch.randint(10, (16,))).backward()
    optimizer.step()
