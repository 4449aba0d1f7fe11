"""
cause: between_steps|program_code
told: look at all tensors in one call|what only watches|less often where no step learns
"""

import torch
from measured import batch, network, steps
from torch.nn.functional import cross_entropy


def histograms(model):
    return [torch.histogram(value.detach(), bins=50).hist.tolist() for value in model.parameters()]


torch.set_num_threads(1)
model = network()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in steps():
    rows, labels = batch()
    optimizer.zero_grad()
    cross_entropy(model(rows), labels).backward()
    optimizer.step()
    if step % 1 == 0:
        # -> if step % 20 == 0:
        histograms(model)
