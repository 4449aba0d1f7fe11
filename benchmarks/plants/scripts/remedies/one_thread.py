"""
cause: program_code
told: or leave torch more than one thread at one_thread.py:\d+ \(torch.set_num_threads\)
"""

import torch
from measured import batch, network, steps
from torch.nn.functional import cross_entropy

threads = 1
# -> threads = 2
torch.set_num_threads(threads)
model = network(width=128)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
images = torch.rand(64, 3, 256, 256)


def brightened(images):
    mean = images.mean(dim=(2, 3), keepdim=True)
    return ((images - mean) * torch.rand(64, 1, 1, 1) + mean).clamp(0, 1)


for _ in steps():
    rows, labels = batch(64)
    given = brightened(images)
    optimizer.zero_grad()
    cross_entropy(model(rows + given[:, 0, 0, :64]), labels).backward()
    optimizer.step()
