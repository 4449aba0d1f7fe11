"""
cause: program_code
told: over all tensors at once .torch._foreach_norm
"""

import torch
from measured import batch, network, steps
from torch.nn.functional import cross_entropy

torch.set_num_threads(1)
model = network(width=32, layers=60)
watched = {}


def watch(optimizer, args, named):
    norms = {name: one.grad.norm().item() for name, one in model.named_parameters()}
    # -> norms = {"all": torch.nn.utils.get_total_norm([one.grad for one in model.parameters()]).item()}
    for name, norm in norms.items():
        watched.setdefault(name, []).append(norm)
        watched[name] = watched[name][-100:]


optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
optimizer.register_step_pre_hook(watch)
for _ in steps(200):
    rows, labels = batch(16)
    optimizer.zero_grad()
    cross_entropy(model(rows), labels).backward()
    optimizer.step()
