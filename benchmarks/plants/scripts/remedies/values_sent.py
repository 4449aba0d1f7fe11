"""
cause: program_code
told: let every rank work it out itself \(draw with a common seed\)
ranks: 2
"""

import numpy as np
import torch
import torch.distributed as dist
from measured import batch, network, steps
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.set_num_threads(1)
random = np.random.default_rng(0)  # on each rank alike


def drawn():
    values = [random.integers(10**6, size=200_000).tolist() if dist.get_rank() == 0 else None]
    # ->
    dist.broadcast_object_list(values)
    # ->
    return torch.tensor(values[0])
    # -> return torch.from_numpy(random.integers(10**6, size=200_000))


model = DistributedDataParallel(network(width=128))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in steps(100):
    rows, labels = batch(64)
    rows = rows + drawn()[: 64 * 64].view(64, 64) % 2
    optimizer.zero_grad()
    cross_entropy(model(rows), labels).backward()
    optimizer.step()
dist.destroy_process_group()
