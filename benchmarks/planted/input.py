"""Losses planted in the reading of batches."""

import json
import os
import time
import zlib
from typing import Any

import torch
from planted.job import PAUSE_S, PERIOD, Rank, Samples, loaded, read_in_step, squared, steps, train
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset


def loader_one_rank(rank: Rank, recorder: Any, num: int) -> None:
    train(rank, recorder, num, delay_s=PAUSE_S / rank.batch if rank.rank == 1 else 0.0)


def loader_all_ranks(rank: Rank, recorder: Any, num: int) -> None:
    train(rank, recorder, num, delay_s=PAUSE_S / rank.batch)


class Transformed(Dataset[torch.Tensor]):
    """Every sample goes through a Python loop."""

    def __init__(self, width: int) -> None:
        self.width = width

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> torch.Tensor:
        checksum = 0
        for i in range(30_000):
            checksum ^= i * index
        return torch.full((self.width,), float(checksum % 7))


def slow_transform(rank: Rank, recorder: Any, num: int) -> None:
    """num_workers=0: the samples are made by the training process."""
    read_in_step(rank, recorder, num, DataLoader(Transformed(rank.width), batch_size=rank.batch))


def restarted_workers(rank: Rank, recorder: Any, num: int) -> None:
    """An epoch is a few steps, and every epoch starts its worker anew."""
    model = DistributedDataParallel(rank.model())
    samples_of_epoch = torch.utils.data.Subset(Samples(rank, 0.0), range(PERIOD * rank.batch))
    batches: Any = iter(())

    def loss_of(step: int) -> torch.Tensor:
        nonlocal batches
        x = next(batches, None)
        if x is None:
            batches = iter(DataLoader(samples_of_epoch, batch_size=rank.batch, num_workers=1))
            x = next(batches)
        return squared(model, x)

    steps(rank, recorder, num, model, loss_of)


class Packed(Dataset[torch.Tensor]):
    """Samples that are unpacked when they are read, by the training process."""

    def __init__(self, rank: Rank) -> None:
        self.width, self.times = rank.width, 1 if rank.rank == 1 else 0
        self.packed = zlib.compress(os.urandom(1 << 16), 1)

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> torch.Tensor:
        size = sum(len(zlib.compress(zlib.decompress(self.packed), 1)) for _ in range(self.times))
        return torch.full((self.width,), float(size % 7))


def decompression(rank: Rank, recorder: Any, num: int) -> None:
    """Rank 1's part of the data set is packed."""
    read_in_step(rank, recorder, num, DataLoader(Packed(rank), batch_size=rank.batch))


class Shards(Dataset[torch.Tensor]):
    """Every hundredth or so sample opens a new file."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> torch.Tensor:
        if index % (6 * self.rank.batch) == 0:
            time.sleep(6 * PAUSE_S)
        return torch.ones(self.rank.width)


def long_batches_all(rank: Rank, recorder: Any, num: int) -> None:
    """One batch in six waits for a file, on all ranks; the loader is read between the steps."""
    loaded(rank, recorder, num, DataLoader(Shards(rank), batch_size=rank.batch))


def parsing_rank(rank: Rank, recorder: Any, num: int) -> None:
    """Rank 1 parses text while it collates."""
    text = json.dumps([list(range(200))] * 300)

    def collate(samples: list[torch.Tensor]) -> torch.Tensor:
        for _ in range(20 if rank.rank == 1 else 0):
            json.loads(text)
        return torch.stack(samples)

    loaded(rank, recorder, num, DataLoader(Samples(rank, 0.0), batch_size=rank.batch, collate_fn=collate))
