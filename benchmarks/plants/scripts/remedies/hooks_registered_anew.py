"""
cause: program_code
told: register (hooks|a hook) once, before the loop
"""

import torch
from measured import batch, network, steps
from torch.nn.functional import cross_entropy

torch.set_num_threads(1)
model = network(width=256, layers=12)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
means = {}


def watches(module, _, outputs):
    means[module] = outputs.detach().abs().mean()


for step in steps(120):
    if step >= 0:
        # -> if step == 0:
        for module in model:
            module.register_forward_hook(watches)
    rows, labels = batch(64)
    optimizer.zero_grad()
    cross_entropy(model(rows), labels).backward()
    optimizer.step()
