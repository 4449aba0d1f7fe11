"""
cause: data_loading
told: compute once for each sample what Rows\.turned\(\), turned_by_workers.py:\d+ gives
"""

import torch
from measured import network, steps
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset


class Rows(Dataset):
    def __init__(self):
        self.rows = torch.randn(64, 64).tolist()
        # -> rows = torch.randn(64, 64).tolist()
        # -> self.rows = [self.turned(row) for row in rows]

    def __len__(self):
        return 32 * 100

    def turned(self, row):
        for _ in range(500):
            row = [0.8 * one + 0.6 * other for one, other in zip(row, row[::-1], strict=True)]
        return torch.tensor(row)

    def __getitem__(self, index):
        return self.turned(self.rows[index % 64]), index % 10
        # -> return self.rows[index % 64], index % 10


if __name__ == "__main__":
    torch.set_num_threads(1)
    model = network(width=64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batches = iter(DataLoader(Rows(), batch_size=32, num_workers=1))
    for _ in steps():
        rows, labels = next(batches)
        optimizer.zero_grad()
        cross_entropy(model(rows), labels).backward()
        optimizer.step()
