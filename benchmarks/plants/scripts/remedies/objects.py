"""
cause: transfer|small_messages
told: send tensors of a known size instead of pickled objects.*objects.py:\d+
ranks: 2
"""

import torch
import torch.distributed as dist
from measured import batch, network, steps
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.set_num_threads(1)
model = DistributedDataParallel(network(width=128))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in steps(100):
    rows, labels = batch(64)
    optimizer.zero_grad()
    output = model(rows)
    cross_entropy(output, labels).backward()
    optimizer.step()
    seen = [torch.empty(64, dtype=torch.int64) for _ in range(2)]
    found = [{"id": number, "guess": int(row.argmax())} for number, row in enumerate(output)]
    # ->
    dist.all_gather_object(seen, found * 40)
    # -> dist.all_gather(seen, output.argmax(-1))
dist.destroy_process_group()
