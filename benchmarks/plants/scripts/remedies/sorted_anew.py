"""
cause: program_code|between_steps
told: sort what does not change once
"""

import torch
from measured import batch, network, steps
from torch.nn.functional import cross_entropy

torch.set_num_threads(1)
model = network()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
scores = torch.randn(400_000)
for _ in steps():
    rows, labels = batch()
    best = torch.sort(scores, descending=True)[0][:64]
    # -> best = torch.topk(scores, 64)[0]
    rows = rows + best
    optimizer.zero_grad()
    cross_entropy(model(rows), labels).backward()
    optimizer.step()
