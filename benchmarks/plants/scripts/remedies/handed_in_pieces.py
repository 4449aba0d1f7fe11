"""
cause: data_loading
told: put a batch together in the worker
"""

import torch
from measured import network, steps
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, default_collate


class Parts(Dataset):
    def __len__(self):
        return 64 * 60

    def __getitem__(self, number):
        return [torch.randn(16) for _ in range(4)], number % 10


def as_they_are(samples):
    return samples


if __name__ == "__main__":
    torch.set_num_threads(1)
    model = network(width=64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(Parts(), batch_size=64, num_workers=1, collate_fn=as_they_are)
    # -> loader = DataLoader(Parts(), batch_size=64, num_workers=1)
    batches = iter(loader)
    for _ in steps():
        batch = next(batches)
        parts, labels = default_collate(batch)
        # -> parts, labels = batch
        optimizer.zero_grad()
        cross_entropy(model(torch.cat(parts, dim=1)), labels).backward()
        optimizer.step()
