"""
cause: program_code|between_steps
told: index one tensor of all samples
"""

import torch
from measured import network, steps
from torch.nn.functional import cross_entropy

torch.set_num_threads(1)
model = network()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
pages, kinds = torch.randn(10_000, 64), torch.randint(10, (10_000,))
parts = list(pages)
for _ in steps():
    chosen = torch.randint(10_000, (32_768,))
    labels = kinds[chosen[:256]]
    rows = torch.stack([parts[index] for index in chosen.tolist()]).view(256, 128, 64).mean(dim=1)
    # -> rows = pages[chosen].view(256, 128, 64).mean(dim=1)
    optimizer.zero_grad()
    cross_entropy(model(rows), labels).backward()
    optimizer.step()
