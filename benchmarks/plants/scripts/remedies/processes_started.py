"""
cause: program_code|between_steps|pause
told: start no process in a step
"""

import subprocess

import torch
from measured import batch, network, steps
from torch.nn.functional import cross_entropy

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
        subprocess.run(["uptime"], capture_output=True)
