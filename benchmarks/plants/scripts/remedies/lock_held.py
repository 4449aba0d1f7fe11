"""
cause: pause
told: does in another process \(workers of a DataLoader, a ProcessPoolExecutor\)
"""

import json
import multiprocessing  # noqa: F401
import threading

import torch
from measured import batch, network, steps
from torch.nn.functional import cross_entropy


def summarize():
    events = [{"host": f"node{i % 7}", "value": i} for i in range(2000)]
    while True:
        totals = {}
        for event in events:
            totals[event["host"]] = totals.get(event["host"], 0) + event["value"]
        json.dumps(totals)


torch.set_num_threads(1)
model = network(width=128, layers=20)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
threading.Thread(target=summarize, daemon=True).start()
# -> multiprocessing.get_context("fork").Process(target=summarize, daemon=True).start()
rows, labels = batch(64)
for _ in steps(200):
    optimizer.zero_grad()
    cross_entropy(model(rows), labels).backward()
    optimizer.step()
