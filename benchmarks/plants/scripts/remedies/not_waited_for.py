"""
cause: small_messages
told: join tensors to buckets of a MiB and more
ranks: 2
"""

import torch
import torch.distributed as dist
from measured import batch, network, steps
from torch.nn.functional import cross_entropy

dist.init_process_group("gloo")
torch.set_num_threads(1)
model = network(width=64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
values = [torch.randn(64) for _ in range(150)]
# -> values = [torch.randn(150, 64)]
for _ in steps(150):
    sent = [dist.all_reduce(value, async_op=True) for value in values]
    rows, labels = batch(64)
    optimizer.zero_grad()
    cross_entropy(model(rows), labels).backward()
    optimizer.step()
    for call in sent:
        call.wait()
dist.destroy_process_group()
