"""A third set of planted causes, on gloo: written, with its labels, before `aorta why` had seen one of them.

    python benchmarks/planted_third.py --output planted_causes_gloo_third.json

The same options and rows as benchmarks/planted_causes.py.
"""

import os
import tempfile
import threading
import time
import zlib
from typing import Any

import planted_causes
import torch
import torch.distributed as dist
from planted_causes import PAUSE_S, PERIOD, Case, Rank, train
from planted_second import plain
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

CPU = ("cpu",)
THIRD = {
    "decompression": Case("data_loading", who=1, on=CPU),
    "slow_pipe": Case("late_rank", who=0, on=CPU),
    "lock_in_thread": Case("late_rank", who=1, on=CPU),
    "uneven_rows": Case("late_rank", who=1, on=CPU),
    "checkpoint_all": Case("checkpoint", on=CPU),
    "one_bucket": Case("transfer", on=CPU),
    "gradient_penalty": Case("transfer", on=CPU),
    "metrics_each_step": Case("small_messages", on=CPU),
    "clean_large": Case(None, on=CPU),
    "clean_thread": Case(None, on=CPU),
}


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
    model = DistributedDataParallel(rank.model())
    update = torch.optim.SGD(model.parameters(), lr=1e-3)
    loader = iter(DataLoader(Packed(rank), batch_size=rank.batch))
    for _ in range(num):
        with recorder.step(tokens=rank.batch):
            model(next(loader)).square().mean().backward()
            update.step()
            update.zero_grad()


def slow_pipe(rank: Rank, recorder: Any, num: int) -> None:
    """Rank 0 prints within the step to a pipe that is read slowly."""
    reading, writing = os.pipe()
    is_over = threading.Event()

    def read() -> None:
        while not is_over.is_set():
            time.sleep(PAUSE_S)
            os.read(reading, 1 << 16)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()

    def hook(step: int, loss: torch.Tensor) -> None:
        if rank.rank == 0:
            os.write(writing, b"x" * (1 << 16))

    train(rank, recorder, num, in_step=hook)
    is_over.set()


def lock_in_thread(rank: Rank, recorder: Any, num: int) -> None:
    """A thread of rank 1 holds a lock that every step takes."""
    lock, is_over = threading.Lock(), threading.Event()

    def hold() -> None:
        while not is_over.is_set():
            with lock:
                time.sleep(PAUSE_S)
            time.sleep(0.001)

    if rank.rank == 1:
        threading.Thread(target=hold, daemon=True).start()

    def hook(step: int, loss: torch.Tensor) -> None:
        with lock:
            pass

    train(rank, recorder, num, in_step=hook)
    is_over.set()


def uneven_rows(rank: Rank, recorder: Any, num: int) -> None:
    """Every third batch of rank 1 is four times as long."""
    model = DistributedDataParallel(rank.model(2))
    update = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(num):
        with recorder.step(tokens=rank.batch):
            times = 4 if rank.rank == 1 and step % 3 == 0 else 1
            model(torch.randn(64 * times * rank.batch, rank.width)).square().mean().backward()
            update.step()
            update.zero_grad()


def checkpoint_all(rank: Rank, recorder: Any, num: int) -> None:
    """Every rank writes its own part every few steps, within the step."""
    state = {"weights": torch.ones(12 << 20)}
    with tempfile.TemporaryDirectory() as folder:

        def hook(step: int, loss: torch.Tensor) -> None:
            if step % PERIOD == 0:
                torch.save(state, f"{folder}/state_{rank.rank}.pt")

        train(rank, recorder, num, in_step=hook)


def one_bucket(rank: Rank, recorder: Any, num: int) -> None:
    """All gradients in one bucket, whose all-reduce begins when backward is over."""
    plain(rank, recorder, num, rows=rank.batch, bucket_cap_mb=10_000)


def gradient_penalty(rank: Rank, recorder: Any, num: int) -> None:
    """The parameters of all ranks are averaged, by hand, in every step."""
    parameters = torch.ones(6 << 20)

    def hook(step: int, loss: torch.Tensor) -> None:
        dist.all_reduce(parameters)

    train(rank, recorder, num, in_step=hook)


def metrics_each_step(rank: Rank, recorder: Any, num: int) -> None:
    """Eighty metrics, an all-reduce each."""

    def hook(step: int, loss: torch.Tensor) -> None:
        for _ in range(80):
            dist.all_reduce(torch.ones(1))

    train(rank, recorder, num, in_step=hook)


def clean_large(rank: Rank, recorder: Any, num: int) -> None:
    """Much computing and few gradients."""
    plain(rank, recorder, num, rows=128 * rank.batch)


def clean_thread(rank: Rank, recorder: Any, num: int) -> None:
    """A thread that mostly sleeps."""
    is_over = threading.Event()
    threading.Thread(target=lambda: is_over.wait(600), daemon=True).start()
    plain(rank, recorder, num)
    is_over.set()


def main() -> None:
    planted_causes.CASES.clear()
    planted_causes.CASES.update(THIRD)
    planted_causes.BODIES.update({name: globals()[name] for name in THIRD})
    planted_causes.main()


if __name__ == "__main__":
    main()
