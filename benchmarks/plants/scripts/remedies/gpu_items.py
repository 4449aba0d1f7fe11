"""
cause: data_loading
told: ^cut batches out of the device's tensors
device: cuda
"""

import torch
from measured import network, steps
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

device = torch.device("cuda")
model = network().to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
rows, labels = torch.randn(262_144, 64, device=device), torch.randint(10, (262_144,), device=device)


loader = DataLoader(TensorDataset(rows, labels), batch_size=1024, shuffle=True)
# -> numbers = torch.randperm(262_144, device=device).split(1024)
# -> loader = ((rows[some], labels[some]) for some in numbers)
for _, (some, of_some) in zip(steps(200), loader, strict=False):
    optimizer.zero_grad()
    cross_entropy(model(some), of_some).backward()
    optimizer.step()
