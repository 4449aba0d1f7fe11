"""
cause: copy
told: pin the host memory
device: cuda
"""

import torch
from measured import network, steps
from torch.nn.functional import cross_entropy

device = torch.device("cuda")
model = network(width=1024, layers=2, features=4096).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
batches = [torch.randn(8192, 4096) for _ in range(4)]
# -> batches = [torch.randn(8192, 4096).pin_memory() for _ in range(4)]
# -> copies = torch.cuda.Stream()
# -> following = batches[0].to(device)
labels = torch.randint(10, (8192,), device=device)
for step in steps(400):
    rows = batches[step % 4].to(device)
    # -> torch.cuda.current_stream().wait_stream(copies)
    # -> rows = following
    # -> rows.record_stream(torch.cuda.current_stream())
    # -> with torch.cuda.stream(copies):
    # ->     following = batches[(step + 1) % 4].to(device, non_blocking=True)
    optimizer.zero_grad()
    cross_entropy(model(rows), labels).backward()
    optimizer.step()
