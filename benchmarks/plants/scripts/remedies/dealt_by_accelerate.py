"""
cause: transfer|data_loading|late_rank
told: (let each rank load its own part of a batch|dispatch_batches=False)
ranks: 2
library: accelerate
"""

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from measured import network, steps
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, IterableDataset

torch.set_num_threads(1)


class Stream(IterableDataset):
    def __iter__(self):
        while True:
            yield from zip(torch.randn(256, 4096), torch.randint(10, (256,)), strict=True)


configuration = DataLoaderConfiguration()
# -> configuration = DataLoaderConfiguration(dispatch_batches=False)
accelerator = Accelerator(cpu=True, dataloader_config=configuration)
torch.manual_seed(1)
model = network(width=64, layers=1, features=4096)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(Stream(), batch_size=256))
batches = iter(loader)
for _ in steps(100):
    rows, labels = next(batches)
    optimizer.zero_grad()
    accelerator.backward(cross_entropy(model(rows), labels))
    optimizer.step()
torch.distributed.destroy_process_group()
