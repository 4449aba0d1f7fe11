"""
cause: data_loading
told: prepare samples before training.*loader_before.py:\d+|move work out of __getitem__
ranks: 2
"""

import torch
import torch.distributed as dist
from measured import network, steps
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset


def features(text):
    counts = torch.zeros(64)
    for letter in text * 40:
        counts[ord(letter) % 64] += 1
    return counts


class Sentences(Dataset):
    def __init__(self, texts):
        self.texts = texts
        self.known = {}
        # -> self.known = {text: features(text) for text in set(texts)}

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, index):
        text = self.texts[index]
        return self.known[text] if text in self.known else features(text), index % 10


dist.init_process_group("gloo")
torch.set_num_threads(1)
model = DistributedDataParallel(network(width=768))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
batches = iter(DataLoader(Sentences(["a story", "of two", "cities!"] * 1000), batch_size=32))
for _ in steps():
    rows, labels = next(batches)
    optimizer.zero_grad()
    cross_entropy(model(rows), labels).backward()
    optimizer.step()
dist.destroy_process_group()
