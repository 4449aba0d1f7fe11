"""
cause: program_code|between_steps
told: unpack once, before training
"""

import zlib

import numpy as np
import torch
from measured import batch, network, steps
from torch.nn.functional import cross_entropy

torch.set_num_threads(1)
model = network()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
pages = np.random.randint(0, 4, (256, 64, 64), dtype=np.int32)
packed = zlib.compress(pages.tobytes())
for _ in steps():
    rows, labels = batch()
    unpacked = np.frombuffer(zlib.decompress(packed), dtype=np.int32).reshape(pages.shape)
    # -> unpacked = pages
    rows = rows + torch.from_numpy(unpacked[:, :, 0].copy())
    optimizer.zero_grad()
    cross_entropy(model(rows), labels).backward()
    optimizer.step()
