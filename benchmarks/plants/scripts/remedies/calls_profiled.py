"""
cause: program_code
told: leave cProfile .* out
"""

import cProfile

import torch
from measured import batch, network, steps
from torch.nn.functional import cross_entropy

torch.set_num_threads(1)
model = network(width=16, layers=60)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.001, fused=True)
cProfile.Profile().enable()
# ->
for _ in steps(60):
    rows, labels = batch(16)
    optimizer.zero_grad()
    cross_entropy(model(rows), labels).backward()
    optimizer.step()
