"""
cause: late_rank|imbalance
told: 'give all ranks (as much work: .* what rank 1 alone computes|batches of like size)'
ranks: 2
"""

import torch
import torch.distributed as dist
from measured import steps
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(500, 64)
        self.body = nn.TransformerEncoderLayer(64, 4, 256, batch_first=True)
        self.head = nn.Linear(64, 500)

    def forward(self, ids):
        return self.head(self.body(self.table(ids)))


dist.init_process_group("gloo")
torch.set_num_threads(1)
torch.manual_seed(0)
lengths = (16 + torch.rand(256) * 144).long().sort().values
rank = dist.get_rank()
own = lengths[128 * rank : 128 * rank + 128]
# -> own = lengths[rank::2]
model = DistributedDataParallel(Words())
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in steps(100):
    chosen = own[16 * (step % 8) :][:16]
    ids = torch.zeros(16, int(chosen.max()), dtype=torch.long)
    for row, length in zip(ids, chosen, strict=True):
        row[:length] = torch.randint(1, 500, (int(length),))
    optimizer.zero_grad()
    cross_entropy(model(ids).flatten(0, 1), ids.flatten(), ignore_index=0).backward()
    optimizer.step()
dist.destroy_process_group()
