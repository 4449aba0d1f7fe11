"""
cause: pause|program_code
told: call train\(\) and eval\(\) where the mode changes
"""

import torch
from measured import batch, network, steps
from torch.nn.functional import cross_entropy

torch.set_num_threads(1)
tasks = torch.nn.ModuleList(network(width=8, layers=8) for _ in range(400))
model = network(width=64)
modules = torch.nn.ModuleDict({"shared": model, "tasks": tasks})
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
inputs, labels = batch(64)
for _ in steps(200):
    modules.train()
    # ->
    optimizer.zero_grad()
    cross_entropy(model(inputs), labels).backward()
    optimizer.step()
    modules.eval()
    # ->
