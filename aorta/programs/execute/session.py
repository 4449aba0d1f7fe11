"""The ranks of a comparison or run: their process group and device, and a session on one problem.

Each command enters ranks(); StrategySession then builds strategies, proves that their results are right and
times them. Every rank does the same and gets the same answers: a rank where something fails tells the others
over the control group, so that none waits for it in a collective.
"""

import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import click
import torch
import torch.distributed as dist

from aorta.device.backend import accelerator, backend_of
from aorta.errors import AortaError
from aorta.launcher import launched_rank, rank_text
from aorta.programs.execute.collectives import failures
from aorta.programs.execute.problem import DTYPES, Arena, Operands, Problem, reference
from aorta.programs.execute.strategies import (
    Strategy,
    StrategyBench,
    StrategyUnavailable,
    strategy_streams,
)
from aorta.programs.execute.timing import Leg, RoundTimes, Stopwatch, Stuck
from aorta.programs.language.expr import HostProgramError

MULTICAST_OFF = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
"""Environment under which neither NCCL nor torch uses NVLink multicast."""
STUCK_EXIT = 3
"""Exit status where work on the device did not end."""
LONGEST_MULTIPLY_S = 0.25
"""Seconds of the longest multiply that a comparison on a CPU accepts: it measures several hundred."""
SAMPLE = (64, 1024, 1024)
"""Rows, columns and inner size, at most, of the multiply that tells how fast the CPU is."""
CONTROL_TIMEOUT_S = 60
NUM_PROOFS = 2
"""Proofs of one strategy: two, for both halves of buffers that are used in turn."""


@contextmanager
def ranks() -> Iterator[torch.device]:
    """Context with the process group of torchrun, or of this process alone; yields the rank's device.

    An AortaError is the same on all ranks: rank 0 raises it, the others exit with the same status.
    """
    # Before anything of NCCL or symmetric memory: both read their settings once.
    for name, value in MULTICAST_OFF.items():
        os.environ.setdefault(name, value)
    device = local_device()
    backend = backend_of(device).collectives
    if rank_text() is not None:
        # Without device_id: groups would be split off one communicator, and share its settings.
        dist.init_process_group(backend)
    else:
        store = torch._C._distributed_c10d.HashStore()
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
    rank = dist.get_rank()
    try:
        yield device
    except Stuck as error:
        click.echo(f"error: rank {rank}: {error}", err=True)
        sys.stderr.flush()
        os._exit(STUCK_EXIT)  # nothing that waits for the device would return
    except AortaError:
        dist.destroy_process_group()
        if rank:
            sys.exit(2)
        raise
    else:
        dist.destroy_process_group()


def local_device() -> torch.device:
    """The rank's GPU, made current, or the CPU where there is none.

    Raises HostProgramError where there are fewer GPUs than ranks on this machine.
    """
    gpus = accelerator()
    if not gpus.is_available():
        return torch.device("cpu")
    local = launched_rank().local_rank
    if local >= gpus.count():
        raise HostProgramError(f"{gpus.count()} GPUs cannot serve local rank {local}")
    device = gpus.device(local)
    gpus.set_device(device)
    return device


def problem_of(op: str, options: dict[str, Any]) -> Problem:
    """Problem of a command's options on these ranks."""
    return Problem(
        op, options["m"], options["n"], options["k"], DTYPES[options["dtype"]], dist.get_world_size()
    )


def refuse_long_multiply(problem: Problem, device: torch.device) -> None:
    """Raise HostProgramError, on all ranks, where a comparison would take a CPU minutes or hours."""
    if device.type != "cpu":
        return
    inner, columns = problem.w_shape
    rows, width, depth = (min(*pair) for pair in zip((problem.m, columns, inner), SAMPLE, strict=True))
    a, w = torch.ones(rows, depth, dtype=problem.dtype), torch.ones(depth, width, dtype=problem.dtype)
    a @ w  # the first multiply also starts torch's threads
    began = time.perf_counter()
    a @ w
    rate = rows * width * depth / (time.perf_counter() - began)
    slowest = torch.tensor(rate, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MIN)
    multiply_s = problem.m * columns * inner / slowest.item()
    if multiply_s > LONGEST_MULTIPLY_S:
        fitting = max(1, int(problem.m * LONGEST_MULTIPLY_S / 2 / multiply_s) // problem.num_ranks)
        raise HostProgramError(
            f"without GPUs one multiply of {problem.m} x {problem.n} x {problem.k} takes about"
            f" {multiply_s:.1f} s here, and hundreds are measured; --m {fitting * problem.num_ranks} would do"
        )


Make = Callable[[StrategyBench], Strategy]


@dataclass(frozen=True)
class Family:
    """Alternatives under one name, of which the fastest goes on."""

    name: str
    members: list[Make]


class StrategySession:
    """Session on one problem, on all ranks of the default process group. Constructing it is collective."""

    def __init__(self, problem: Problem, device: torch.device, num_workers: int) -> None:
        self.problem = problem
        self.device = device
        self.rank = dist.get_rank()
        group: Any = dist.group.WORLD
        self.control = control_group()
        operands = Operands(problem, device, self.rank)
        arena = Arena(problem.dtype, device)
        streams = strategy_streams(num_workers, device)
        self.bench = StrategyBench(
            problem, operands, arena, streams, num_workers, device, self.rank, group, control=self.control
        )
        self.watch = Stopwatch(streams, device, group)
        self.unavailable: dict[str, str] = {}
        """Label -> why it could not be run, by the first rank that could not."""
        self._product: torch.Tensor | None = None
        operands.fill_random()

    def build(self, families: Sequence[Family]) -> dict[str, list[Strategy]]:
        """Strategies that run and are right, by family; the others are in `unavailable`. Collective."""
        built: dict[str, list[Strategy]] = {}
        strategies: list[tuple[str, Strategy]] = []
        for family in families:
            reasons = []
            for make in family.members:
                strategy, reason = self._strategy(make)
                if strategy is None:
                    reasons.append(reason)
                else:
                    strategies.append((family.name, strategy))
            if reasons and len(reasons) == len(family.members):
                self.unavailable[family.name] = reasons[0]
        for name, strategy in self._proved(strategies):
            built.setdefault(name, []).append(strategy)
        return built

    def measure(self, legs: Sequence[Leg], num_rounds: int, num_warmup: int = 2) -> RoundTimes:
        """Times of the legs on all ranks. Collective."""
        return self.watch.measure(legs, num_rounds, num_warmup)

    def close(self) -> None:
        self.bench.streams.close()

    def _strategy(self, make: Make) -> tuple[Strategy | None, str]:
        """The strategy, or None and the reason why some rank could not make it."""
        strategy: Strategy | None = None
        problem: str | None = None
        try:
            strategy = make(self.bench)
        except Stuck:
            raise
        except (StrategyUnavailable, HostProgramError) as error:
            problem = str(error)
        except Exception as error:  # one rank must not leave the others waiting
            problem = _described(error)
        reasons = failures(problem, self.control)
        return (None, reasons[0]) if reasons else (strategy, "")

    def _proved(self, strategies: list[tuple[str, Strategy]]) -> list[tuple[str, Strategy]]:
        """Strategies that give the reference's bits from poisoned buffers, every time."""
        if not strategies:
            return []
        operands = self.bench.operands
        operands.fill_integers()
        if self._product is None:
            self._product = reference(operands, self.bench.group)
        right: list[tuple[str, Strategy]] = []
        for family, strategy in strategies:
            reasons = failures(self._proof(strategy), self.control)
            if reasons:
                self.unavailable[f"{family}: {strategy.label}"] = reasons[0]
            else:
                right.append((family, strategy))
        operands.fill_random()
        self.watch.finish()
        return right

    def _proof(self, strategy: Strategy) -> str | None:
        """Fault in a strategy's result on this rank, or in running it, as a sentence; None without one."""
        try:
            self.watch.finish()
            strategy.poison()
            self.watch.finish()
        except Stuck:
            raise
        except Exception as error:
            return _described(error)
        dist.barrier(group=self.control)  # a rank that is ahead writes into its peers' buffers
        try:
            for _ in range(NUM_PROOFS):
                strategy.submit()
                self.watch.finish()
                assert self._product is not None
                if not torch.equal(strategy.result(), strategy.expected(self._product)):
                    return "its result differs from the reference"
        except Stuck:
            raise
        except Exception as error:
            return _described(error)
        return None


def _described(error: Exception) -> str:
    """The error in one line, with the line of code that raised it, for a table."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    text = str(error).strip().splitlines()[0] if str(error).strip() else "no message"
    return f"{type(error).__name__}: {text} ({os.path.basename(last.filename)}:{last.lineno})"


_control: dict[Any, dist.ProcessGroup] = {}


def control_group() -> dist.ProcessGroup:
    """A gloo group of all ranks for agreements between hosts, made once per default group. Collective."""
    world = dist.group.WORLD
    if world not in _control:
        _control.clear()
        timeout = timedelta(seconds=CONTROL_TIMEOUT_S)
        _control[world] = dist.new_group(backend="gloo", timeout=timeout)
    return _control[world]
