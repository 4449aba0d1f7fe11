"""
cause: data_loading
told: num_workers=0 at loader_workers.py:\d+
"""

import numpy as np
import torch
from measured import network, steps
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset


class Rows(Dataset):
    def __len__(self):
        return 100_000

    def __getitem__(self, index):
        noise = np.random.default_rng(index)
        return np.sort(noise.standard_normal(12_000))[:64].astype("float32"), index % 10


if __name__ == "__main__":
    torch.set_num_threads(1)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(Rows(), batch_size=32)
    # -> workers = {"num_workers": 1, "prefetch_factor": 4, "persistent_workers": True}
    # -> loader = DataLoader(Rows(), batch_size=32, **workers)
    batches = iter(loader)
    for _ in steps():
        rows, labels = next(batches)
        optimizer.zero_grad()
        for _ in range(4):
            cross_entropy(model(rows.repeat(6, 1)), labels.repeat(6)).backward()
        optimizer.step()
