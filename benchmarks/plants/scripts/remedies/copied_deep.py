"""
cause: program_code|between_steps
told: copy into tensors that are kept
"""

from copy import deepcopy

import torch
from measured import batch, network, steps
from torch.nn.functional import cross_entropy

torch.set_num_threads(1)
model = network(width=64, layers=100)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
kept = deepcopy(model)
copies, weights = list(kept.parameters()), list(model.parameters())
for _ in steps():
    rows, labels = batch(16)
    optimizer.zero_grad()
    cross_entropy(model(rows), labels).backward()
    optimizer.step()
    kept = deepcopy(model)
    # -> torch._foreach_copy_([copy.detach() for copy in copies], [weight.detach() for weight in weights])
