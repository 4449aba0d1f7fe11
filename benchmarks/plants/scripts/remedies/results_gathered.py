"""
cause: transfer|between_steps
told: reduce on each rank what is gathered .* before it is gathered.*results_gathered.py:\d+
ranks: 2
"""

import torch
import torch.distributed as dist
from measured import batch, network, steps
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel


def accuracy(output, labels):
    answers = output
    # -> answers = output.argmax(-1)
    seen, known = [torch.empty_like(answers) for _ in range(2)], [torch.empty_like(labels) for _ in range(2)]
    dist.all_gather(seen, answers)
    dist.all_gather(known, labels)
    guesses = torch.cat(seen).argmax(-1)
    # -> guesses = torch.cat(seen)
    return (guesses == torch.cat(known)).float().mean()


dist.init_process_group("gloo")
torch.set_num_threads(1)
model = DistributedDataParallel(network(width=64, layers=2, classes=20_000))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in steps(80):
    rows, labels = batch(64, classes=20_000)
    optimizer.zero_grad()
    output = model(rows)
    cross_entropy(output, labels).backward()
    optimizer.step()
    accuracy(output.detach(), labels)
dist.destroy_process_group()
