"""
cause: program_code
told: ^keep what is sampled in arrays
"""

import random
from collections import deque

import numpy as np
import torch
from measured import network, steps
from torch.nn.functional import mse_loss

torch.set_num_threads(1)
model = network(width=64, layers=1, classes=1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
seen, goals = torch.randn(4096, 64), torch.randn(4096, 1)
kept = deque((number % 4096 for number in range(1_000_000)), maxlen=1_000_000)


def draw(num):
    drawn = random.sample(kept, num)
    # -> drawn = np.random.default_rng().integers(4096, size=num)
    return torch.from_numpy(np.fromiter(drawn, np.int64))


for _ in steps(300):
    some = draw(256)
    optimizer.zero_grad()
    mse_loss(model(seen[some]), goals[some]).backward()
    optimizer.step()
