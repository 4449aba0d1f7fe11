"""
cause: program_code|between_steps
told: load it once, before training
"""

import tempfile

import numpy as np
import torch
from measured import batch, network, steps
from torch.nn.functional import cross_entropy

torch.set_num_threads(1)
model = network()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
path = f"{tempfile.mkdtemp()}/pages.npy"
np.save(path, np.random.rand(200_000, 64).astype("float32"))
kept = np.load(path, mmap_mode="r")
for _ in steps():
    _, labels = batch()
    pages = np.load(path)
    # -> pages = kept
    rows = torch.from_numpy(np.array(pages[torch.randint(200_000, (256,)).numpy()]))
    optimizer.zero_grad()
    cross_entropy(model(rows), labels).backward()
    optimizer.step()
