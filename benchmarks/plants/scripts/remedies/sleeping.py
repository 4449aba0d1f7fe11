"""
cause: pause
told: do what .*sleeping.py:\d+ does in another thread or process
"""

import threading  # noqa: F401
import time

import torch
from measured import batch, network, steps
from torch.nn.functional import cross_entropy


def send(loss):
    time.sleep(0.015)  # a server that answers


torch.set_num_threads(1)
model = network()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in steps():
    rows, labels = batch()
    optimizer.zero_grad()
    loss = cross_entropy(model(rows), labels)
    send(loss.item())
    # -> threading.Thread(target=send, args=(loss.item(),)).start()
    loss.backward()
    optimizer.step()
