"""
cause: pause|between_steps
told: do what .*validating.py:\d+.* does less often, (or on fewer batches|on less)
"""

import torch
from measured import batch, network, steps
from torch.nn.functional import cross_entropy

torch.set_num_threads(1)
model = network()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
held_out = [batch(512) for _ in range(4)]


def validate():
    model.eval()
    with torch.no_grad():
        print(sum(cross_entropy(model(rows), labels).item() for rows, labels in held_out))
    model.train()


for step in steps(120):
    rows, labels = batch()
    optimizer.zero_grad()
    cross_entropy(model(rows), labels).backward()
    optimizer.step()
    if step % 6 == 5:
        # -> if step % 60 == 59:
        validate()
