"""A small decoder and what the programs beside it share, as a user would write them."""

import os

import torch
import torch.nn.functional as F
from torch import nn

ON_GPU = torch.cuda.is_available() and os.environ.get("PLANT_DEVICE", "cuda") == "cuda"
SIZE = int(os.environ.get("PLANT_SIZE", "8" if ON_GPU else "1"))
"""Factor of batches, so that a large limit is reached within seconds."""


def setup():
    """The device, with a limit on its memory."""
    limit_mib = int(os.environ["PLANT_MIB"])
    if ON_GPU:
        rank = int(os.environ.get("LOCAL_RANK", "0"))
        torch.cuda.set_device(rank)
        total = torch.cuda.get_device_properties(rank).total_memory
        torch.cuda.set_per_process_memory_fraction(limit_mib * 2**20 / total)
        return torch.device("cuda", rank)
    import resource

    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[0])
    limit = pages * resource.getpagesize() + limit_mib * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    torch.set_num_threads(1)
    return torch.device("cpu")


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        scores = (q @ k.transpose(1, 2)) / q.shape[-1] ** 0.5
        return self.out(scores.softmax(-1) @ v)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = Attention(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.down(F.gelu(self.up(x)))


class Decoder(nn.Module):
    def __init__(self, words=512, width=128, layers=4):
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, words)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss_of(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
