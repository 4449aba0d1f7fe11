"""
cause: data_loading
told: persistent_workers=True at loader_anew.py:\d+
"""

import torch
from measured import network, steps
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset


def batches(loader):
    while True:
        yield from loader


if __name__ == "__main__":
    torch.set_num_threads(1)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    rows = TensorDataset(torch.randn(64 * 12, 64), torch.randint(10, (64 * 12,)))
    loader = DataLoader(rows, batch_size=64, num_workers=1)
    # -> loader = DataLoader(rows, batch_size=64, num_workers=1, persistent_workers=True)
    endless = batches(loader)
    for _ in steps(84):
        inputs, labels = next(endless)
        optimizer.zero_grad()
        cross_entropy(model(inputs), labels).backward()
        optimizer.step()
