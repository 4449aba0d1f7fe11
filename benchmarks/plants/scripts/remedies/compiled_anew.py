"""
cause: program_code
told: mark what varies \(torch.compile\(..., dynamic=True\)
"""

import torch
import torch._dynamo
from measured import network, steps
from torch.nn.functional import cross_entropy

torch.set_num_threads(1)
torch._dynamo.config.recompile_limit = 1000
model = network()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)


@torch.compile(backend="eager", dynamic=False)
# -> @torch.compile(backend="eager", dynamic=True)
def bounded(rows):
    return torch.tanh(rows) * rows.shape[0] ** -0.5


for step in steps(120):
    num = 130 + step
    rows, labels = torch.randn(num, 64), torch.randint(10, (num,))
    optimizer.zero_grad()
    outputs = model(bounded(rows))
    loss = cross_entropy(outputs, labels)
    loss.backward()
    optimizer.step()
