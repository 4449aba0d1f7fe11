"""
cause: program_code
told: make tensors of what the program's steps gave without a look at each value
"""

import numpy as np
import torch
from measured import network, steps

torch.set_num_threads(1)
policy = network(width=64, layers=2)
optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)
world = np.random.default_rng(1)


def rollout():
    seen, state = [], world.random((32, 64), dtype=np.float32)
    for _ in range(16):
        seen.append(state)
        with torch.no_grad():
            moves = policy(torch.from_numpy(state)).numpy()
        state = np.roll(state, 1, axis=1) + 0.01 * moves[:, :1]
    return seen


def batch(seen):
    return torch.tensor(seen).flatten(0, 1)
    # -> return torch.from_numpy(np.stack(seen)).flatten(0, 1)


for _ in steps():
    rows = batch(rollout())
    optimizer.zero_grad()
    policy(rows).square().mean().backward()
    optimizer.step()
