"""
cause: program_code
told: leave the debugger, coverage or tracer
"""

import sys

import torch
from measured import batch, network, steps
from torch.nn.functional import cross_entropy

torch.set_num_threads(1)
model = network(width=64, layers=40)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
seen = {}


def looks(frame, *_):
    seen[frame.f_lineno] = frame.f_code.co_name
    return looks


sys.settrace(looks)
# ->
for _ in steps(60):
    rows, labels = batch(16)
    optimizer.zero_grad()
    cross_entropy(model(rows), labels).backward()
    optimizer.step()
