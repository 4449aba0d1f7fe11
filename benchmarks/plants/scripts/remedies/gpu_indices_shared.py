"""
cause: compute
told: ^torch.nn.functional.embedding\(index, table\), or table.index_select
device: cuda
"""

import torch
from measured import network, steps
from torch import nn
from torch.nn.functional import cross_entropy

device = torch.device("cuda")
model = network(width=1024, layers=4).to(device)
table = nn.Parameter(torch.randn(32, 16, device=device))
optimizer = torch.optim.SGD([*model.parameters(), table], lr=0.01, fused=True)
rows, labels = torch.randn(4096, 64, device=device), torch.randint(10, (4096,), device=device)
places = torch.arange(512, device=device)
index = (places[:, None] - places).abs().clamp(max=31)
for _ in steps(200):
    optimizer.zero_grad()
    bias = table[index]
    # -> bias = nn.functional.embedding(index, table)
    loss = cross_entropy(model(rows), labels) + bias.square().mean()
    loss.backward()
    optimizer.step()
