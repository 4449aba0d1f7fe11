"""Losses planted in one rank, which the others wait for."""

import os
import random
import subprocess
import sys
import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from planted.job import PAUSE_S, Rank, fitted, plain, squared, steps, train, varying
from torch.nn.parallel import DistributedDataParallel


def late_rank(rank: Rank, recorder: Any, num: int) -> None:
    model = DistributedDataParallel(rank.model())

    def loss_of(step: int) -> torch.Tensor:
        if rank.rank == 1 and rank.is_cuda:
            rank.compute(40)
        elif rank.rank == 1:
            time.sleep(PAUSE_S)
        return squared(model, rank.batch_of())

    steps(rank, recorder, num, model, loss_of)


def unbalanced_experts(rank: Rank, recorder: Any, num: int) -> None:
    """Rank 1 gets three tokens of four."""
    rows = 64 * rank.batch
    few, many = rows // 4, rows - rows // 4
    expert = rank.model(2)
    for _ in range(num):
        with recorder.step(tokens=rank.batch):
            x = torch.randn(rows, rank.width, device=rank.device)
            sent = [few, many]
            received = [few, few] if rank.rank == 0 else [many, many]
            tokens = torch.empty(sum(received), rank.width, device=rank.device)
            dist.all_to_all_single(tokens, x, received, sent)
            tokens = expert(tokens).detach()
            back = torch.empty(rows, rank.width, device=rank.device)
            dist.all_to_all_single(back, tokens, sent, received)


def longer_sequences(rank: Rank, recorder: Any, num: int) -> None:
    """Batches of one rank are twice as long, without padding."""
    plain(rank, recorder, num, rows=64 * rank.batch * (2 if rank.rank == 1 else 1))


def starved_rank(rank: Rank, recorder: Any, num: int) -> None:
    """Another program wants the core of rank 1."""
    cores = sorted(os.sched_getaffinity(0))
    core = cores[rank.rank % len(cores)]
    os.sched_setaffinity(0, {core})
    busy = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"])
        for _ in range(2 if rank.rank == 1 else 0)
    ]
    try:
        plain(rank, recorder, num)
    finally:
        for process in busy:
            process.kill()
            process.wait()
        os.sched_setaffinity(0, cores)


def unbalanced_stage(rank: Rank, recorder: Any, num: int) -> None:
    """Two pipeline stages; the second one has three layers of four."""
    stage = rank.model(3 if rank.rank == 1 else 1)
    rows = 16 * rank.batch
    for _ in range(num):
        with recorder.step(tokens=rank.batch):
            outputs = []
            for _ in range(4):
                if rank.rank == 0:
                    outputs.append(stage(torch.randn(rows, rank.width)))
                    dist.send(outputs[-1].detach(), 1)
                else:
                    x = torch.empty(rows, rank.width)
                    dist.recv(x, 0)
                    x.requires_grad_()
                    stage(x).square().mean().backward()
                    assert x.grad is not None
                    dist.send(x.grad, 0)
                if rank.rank == 0:
                    gradient = torch.empty(rows, rank.width)
                    dist.recv(gradient, 1)
                    outputs[-1].backward(gradient)


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

    def loss_of(step: int) -> torch.Tensor:
        times = 4 if rank.rank == 1 and step % 3 == 0 else 1
        return squared(model, rank.rows(64 * times * rank.batch))

    steps(rank, recorder, num, model, loss_of)


def late_every_fourth(rank: Rank, recorder: Any, num: int) -> None:
    """Rank 0 writes its metrics in every fourth step."""

    def before(step: int) -> None:
        if rank.rank == 0 and step % 4 == 1:
            time.sleep(4 * PAUSE_S)

    fitted(rank, recorder, num, before=before)


def skewed_experts(rank: Rank, recorder: Any, num: int) -> None:
    """Rank 0 gets four tokens of five; the experts train."""
    rows = 160 * rank.batch
    many, few = rows * 4 // 5, rows - rows * 4 // 5
    expert = rank.model(2)
    update = torch.optim.SGD(expert.parameters(), lr=1e-3)
    for _ in range(num):
        with recorder.step(tokens=rank.batch):
            x = torch.randn(rows, rank.width, device=rank.device)
            sent = [many, few]
            received = [many, many] if rank.rank == 0 else [few, few]
            tokens = torch.empty(sum(received), rank.width, device=rank.device)
            dist.all_to_all_single(tokens, x, received, sent)
            out = expert(tokens)
            out.square().mean().backward()
            update.step()
            update.zero_grad()
            back = torch.empty(rows, rank.width, device=rank.device)
            dist.all_to_all_single(back, out.detach(), sent, received)


def single_microbatch(rank: Rank, recorder: Any, num: int) -> None:
    """Two equal stages, one micro-batch: one stage always waits for the other."""
    stage = rank.model()
    rows = (256 if rank.is_cuda else 32) * rank.batch
    for _ in range(num):
        with recorder.step(tokens=rank.batch):
            x = torch.randn(rows, rank.width, device=rank.device)
            if rank.rank == 0:
                out = stage(x)
                dist.send(out.detach(), 1)
                gradient = torch.empty_like(x)
                dist.recv(gradient, 1)
                out.backward(gradient)
            else:
                dist.recv(x, 0)
                x.requires_grad_()
                stage(x).square().mean().backward()
                assert x.grad is not None
                dist.send(x.grad, 0)


def every_second_batch(rank: Rank, recorder: Any, num: int) -> None:
    varying(rank, recorder, num, lambda step: 3 if rank.rank == 0 and step % 2 == 1 else 1)


def every_seventh_batch(rank: Rank, recorder: Any, num: int) -> None:
    varying(rank, recorder, num, lambda step: 6 if rank.rank == 1 and step % 7 == 3 else 1)


def random_batches(rank: Rank, recorder: Any, num: int) -> None:
    """One batch of rank 1 in four is five times as long."""
    chance = random.Random(7)
    is_long = [chance.random() < 0.25 for _ in range(num)]
    varying(rank, recorder, num, lambda step: 5 if rank.rank == 1 and is_long[step] else 1)


def prints_sometimes(rank: Rank, recorder: Any, num: int) -> None:
    """Rank 0 sends its metrics somewhere slow, within every fourth step."""

    def hook(step: int, loss: torch.Tensor) -> None:
        if rank.rank == 0 and step % 4 == 0:
            time.sleep(2 * PAUSE_S)

    train(rank, recorder, num, in_step=hook)
