"""
cause: compute
told: compute in fp32 on this CPU
"""

import torch
from measured import batch, network, steps
from torch.nn.functional import cross_entropy

torch.set_num_threads(1)
model = network(width=128)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
narrow = torch.autocast("cpu", dtype=torch.bfloat16)
# -> narrow = torch.autocast("cpu", enabled=False)
for _ in steps():
    rows, labels = batch(64)
    optimizer.zero_grad()
    with narrow:
        loss = cross_entropy(model(rows), labels)
    loss.backward()
    optimizer.step()
