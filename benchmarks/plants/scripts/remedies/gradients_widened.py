"""
cause: wide_dtype
told: reduce it as float32, without a conversion
ranks: 2
"""

import torch
import torch.distributed as dist
from measured import batch, network, steps
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.set_num_threads(1)
torch.manual_seed(1)
model = DistributedDataParallel(network(width=640, layers=8), gradient_as_bucket_view=True)


def mean_of_ranks(state, bucket):
    total = bucket.buffer().double()
    # -> total = bucket.buffer()
    done = dist.all_reduce(total, async_op=True).get_future()
    return done.then(lambda call: bucket.buffer().copy_(call.value()[0].div_(dist.get_world_size())))


model.register_comm_hook(None, mean_of_ranks)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in steps(100):
    rows, labels = batch(32)
    optimizer.zero_grad()
    cross_entropy(model(rows), labels).backward()
    optimizer.step()
dist.destroy_process_group()
