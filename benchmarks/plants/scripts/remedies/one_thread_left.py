"""
cause: program_code
told: ^give torch more than its one thread for .* OMP_NUM_THREADS=\d+ in the environment
"""

import torch
from measured import batch, network, steps
from torch.nn.functional import cross_entropy, embedding_bag

# OMP_NUM_THREADS is 1, as torchrun sets it.
call, number = torch.manual_seed, 0
# -> call, number = torch.set_num_threads, 2
call(number)
model = network(width=128)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
vectors = torch.rand(100_000, 64)
for _ in steps():
    rows, labels = batch(64)
    with torch.no_grad():
        history = embedding_bag(torch.randint(100_000, (64, 2048)), vectors)
    optimizer.zero_grad()
    cross_entropy(model(rows + history), labels).backward()
    optimizer.step()
