"""Ranks as groups of threads of one process: they share memory, and signal each other with conditions.

What symmetric memory and its signals are on GPUs, with the same orderings, so that a strategy's own order
can be tried out: who may overwrite what, and when.
"""

import random
import threading
import time
from collections import defaultdict
from typing import Any

import torch

from aorta.device.streams import ThreadStreams
from aorta.programs.execute.problem import Arena, Operands, Problem
from aorta.programs.execute.strategies import StrategyBench, strategy_streams

CPU = torch.device("cpu")
TIMEOUT_S = 20.0


class Peers:
    """All ranks of one problem."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.memory: dict[Any, list[torch.Tensor]] = {}
        self.flags: dict[Any, int] = defaultdict(int)
        self.changed = threading.Condition()
        self.num_signals = [0] * problem.num_ranks
        self.benches = [LocalBench(self, rank) for rank in range(problem.num_ranks)]

    def close(self) -> None:
        for bench in self.benches:
            bench.streams.close()


class LocalBench(StrategyBench):
    def __init__(self, peers: Peers, rank: int) -> None:
        problem = peers.problem
        operands = Operands(problem, CPU, rank)
        operands.fill_integers()
        streams = strategy_streams(1, CPU, further=[-1])
        group: Any = None
        super().__init__(problem, operands, Arena(problem.dtype, CPU), streams, 1, CPU, rank, group)
        self.peers = peers

    def symmetric(self, name: str, shape: tuple[int, ...]) -> Any:
        ranks = range(self.problem.num_ranks)
        if (name, shape) not in self.peers.memory:
            poisoned = [torch.full(shape, float("nan"), dtype=self.problem.dtype) for _ in ranks]
            self.peers.memory[name, shape] = poisoned
        return LocalBuffer(self.peers.memory[name, shape], self.rank)

    def signals(self, num_slots: int) -> Any:
        self.peers.num_signals[self.rank] += 1
        assert isinstance(self.streams, ThreadStreams)
        return LocalSignals(self.peers, self.streams, self.rank, num_slots, self.peers.num_signals[self.rank])


class LocalBuffer:
    def __init__(self, of_rank: list[torch.Tensor], rank: int) -> None:
        self.of_rank = of_rank
        self.local = of_rank[rank]


class LocalSignals:
    def __init__(self, peers: Peers, streams: ThreadStreams, rank: int, num_slots: int, number: int) -> None:
        self.peers, self.streams, self.rank, self.num_slots = peers, streams, rank, num_slots
        self.number = number
        self.epoch = 0
        self.jitter = random.Random(rank)

    def begin(self) -> None:
        self.epoch += 1

    def put(self, stream: int, peer: int, slot: int) -> None:
        assert 0 <= slot < self.num_slots
        key, epoch, pause = (self.number, peer, self.rank, slot), self.epoch, self.jitter.random() * 0.004

        def work() -> None:
            time.sleep(pause)
            with self.peers.changed:
                self.peers.flags[key] = epoch
                self.peers.changed.notify_all()

        self.streams.submit(stream, work)

    def wait(self, stream: int, sender: int, slot: int) -> None:
        assert 0 <= slot < self.num_slots
        key, epoch = (self.number, self.rank, sender, slot), self.epoch

        def work() -> None:
            with self.peers.changed:
                if not self.peers.changed.wait_for(lambda: self.peers.flags[key] >= epoch, TIMEOUT_S):
                    raise TimeoutError(f"rank {self.rank}: no signal {key}")

        self.streams.submit(stream, work)
