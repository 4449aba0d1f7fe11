"""
cause: copy
told: in the type that the data have \(uint8 images, int32 numbers\)
device: cuda
"""

import torch
from measured import network, place, steps
from torch.nn.functional import cross_entropy

device = place()
model = network(width=1024, layers=2, features=4096).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
images = [torch.randint(256, (16384, 4096), dtype=torch.uint8) for _ in range(2)]
batches = [one.float().pin_memory() for one in images]
# -> batches = [one.pin_memory() for one in images]
# -> copies = torch.cuda.Stream()
# -> following = batches[0].to(device)
labels = torch.randint(10, (16384,), device=device)
for step in steps(300):
    rows = batches[step % 2].to(device, non_blocking=True)
    # -> torch.cuda.current_stream().wait_stream(copies)
    # -> following.record_stream(torch.cuda.current_stream())
    # -> rows = following.float()
    # -> with torch.cuda.stream(copies):
    # ->     following = batches[(step + 1) % 2].to(device, non_blocking=True)
    optimizer.zero_grad()
    cross_entropy(model(rows), labels).backward()
    optimizer.step()
