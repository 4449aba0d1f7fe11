"""
cause: data_loading
told: num_workers=1 at loader_few.py:\d+ do not keep up. set more
"""

import time

import torch
from measured import network, steps
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset


class Remote(Dataset):
    def __len__(self):
        return 100_000

    def __getitem__(self, index):
        time.sleep(0.002)  # a request
        return torch.full((64,), float(index % 7)), index % 10


if __name__ == "__main__":
    torch.set_num_threads(1)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batches = iter(DataLoader(Remote(), batch_size=32, num_workers=1))
    # -> batches = iter(DataLoader(Remote(), batch_size=32, num_workers=4))
    for _ in steps():
        rows, labels = next(batches)
        optimizer.zero_grad()
        for _ in range(3):
            cross_entropy(model(rows.repeat(4, 1)), labels.repeat(4)).backward()
        optimizer.step()
