"""
cause: program_code|pause|between_steps
told: leave torch.profiler out, or let its schedule record a few steps and end
"""

import torch
from measured import batch, network, steps
from torch.nn.functional import cross_entropy
from torch.profiler import ProfilerActivity, profile, schedule

torch.set_num_threads(1)
model = network(width=128, layers=30)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
repeat = 0
# -> repeat = 1
with profile(
    activities=[ProfilerActivity.CPU],
    schedule=schedule(wait=0, warmup=1, active=1, repeat=repeat),
    on_trace_ready=lambda done: done.key_averages(),
) as profiler:
    for _ in steps(120):
        rows, labels = batch(64)
        optimizer.zero_grad()
        cross_entropy(model(rows), labels).backward()
        optimizer.step()
        profiler.step()
