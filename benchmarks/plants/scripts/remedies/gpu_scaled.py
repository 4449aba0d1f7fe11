"""
cause: synchronisation
told: leave GradScaler out where autocast is in bf16
device: cuda
"""

import torch
from measured import network, place, steps
from torch.nn.functional import cross_entropy

device = place()
model = network(width=512, layers=60).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
scaler = torch.amp.GradScaler()
# -> scaler = torch.amp.GradScaler(enabled=False)
rows, labels = torch.randn(8192, 64, device=device), torch.randint(10, (8192,), device=device)
for _ in steps(200):
    optimizer.zero_grad()
    with torch.autocast("cuda", torch.bfloat16):
        loss = cross_entropy(model(rows), labels)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
