"""
cause: program_code
told: write no tensors into texts
"""

import logging

import torch
from measured import batch, network, steps
from torch.nn.functional import cross_entropy

torch.set_num_threads(1)
logger = logging.getLogger("training")
model = network(width=256, layers=2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in steps():
    rows, labels = batch(64)
    optimizer.zero_grad()
    outputs = model(rows)
    cross_entropy(outputs, labels).backward()
    logger.debug(f"outputs {outputs}, rows {rows}")
    # -> logger.debug("outputs %s, rows %s", outputs, rows)
    optimizer.step()
