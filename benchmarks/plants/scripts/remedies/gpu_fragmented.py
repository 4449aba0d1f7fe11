"""
cause: memory
told: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
device: cuda
"""

import os

os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:False"
# -> os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"

import torch
from measured import network, place, steps
from torch.nn.functional import cross_entropy

device = place()
if device.type == "cuda":
    whole_bytes = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(2.4e9 / whole_bytes)
model = network(width=1024, layers=4).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
for step in steps(300):
    optimizer.zero_grad()
    held = [torch.zeros((160 + step % 30) << 20, dtype=torch.uint8, device=device) for _ in range(8)]
    rows, labels = torch.randn(4096, 64, device=device), torch.randint(10, (4096,), device=device)
    cross_entropy(model(rows), labels).backward()
    optimizer.step()
    del held
