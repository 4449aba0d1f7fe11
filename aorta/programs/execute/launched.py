"""Process groups for a comparison or a program: under torchrun, or of one process."""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import msgspec
import torch
import torch.distributed as dist

from aorta.errors import AortaError
from aorta.launcher import rank_text
from aorta.programs.execute.binding import bind, expected, in_order_of_ranks
from aorta.programs.execute.comparison.session import StrategySession, local_device
from aorta.programs.execute.problem import DTYPES, Problem, reference
from aorta.programs.execute.rounds import Leg, Stuck, median_of
from aorta.programs.execute.runtime.executor import Execution, lanes_of, streams_needed
from aorta.programs.language.expr import HostProgramError
from aorta.programs.language.text import parse_program

MULTICAST_OFF = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
STUCK_EXIT = 3
LONGEST_MULTIPLY_S = 0.25
"""On a CPU: a comparison measures several hundred."""
SAMPLE = (64, 1024, 1024)
"""Rows, columns and inner size, at most, of the multiply that tells how fast the CPU is."""


class RunResult(msgspec.Struct, frozen=True, kw_only=True):
    """A program that ran: whether it was right, and how long it took."""

    program: str
    ranks: int
    streams: int
    device: str
    right: bool
    """Every rank's result, twice, has the bits of the computation without overlap."""
    time_ms: float
    low_ms: float
    high_ms: float
    rounds: int


def run_program(path: str, device: torch.device, options: dict[str, Any]) -> RunResult:
    """Result of a program file on these ranks."""
    try:
        program = parse_program(Path(path).read_text(encoding="utf-8"), path)
    except (OSError, UnicodeDecodeError) as error:
        raise HostProgramError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    if program.num_ranks != dist.get_world_size():
        raise HostProgramError(
            f"{path} is for {program.num_ranks} ranks, {dist.get_world_size()} are running;"
            f" torchrun --nproc-per-node {program.num_ranks} would start as many"
        )
    problem = problem_of(program.name, options)
    session = StrategySession(problem, device, streams_needed(program, threads=False))
    bench, lanes = session.bench, lanes_of(program)
    groups: dict[str, Any] = {lane: dist.new_group() for lane in lanes[1:]}
    groups |= {lane: bench.group for lane in lanes[:1]}
    tensors = bind(program, bench.operands, bench.arena)
    if device.type == "cpu" and len(lanes) > 1:
        raise HostProgramError("on threads a program may have one lane, this one has several")
    execution = Execution(program, tensors, bench.streams, groups, control=session.control)
    bench.operands.fill_integers()
    product = reference(bench.operands, bench.group, bias="b" in program.buffers())
    expected_product = expected(problem, product, session.rank, tensors["C"].shape[0])
    right = True
    for _ in range(2):
        execution.poison()
        session.watch.finish()
        dist.barrier(group=session.control)
        execution.run()
        session.watch.finish()
        right = right and torch.equal(in_order_of_ranks(problem, tensors["C"]), expected_product)
    verdicts: list[Any] = [None] * problem.num_ranks
    dist.all_gather_object(verdicts, right, group=session.control)
    bench.operands.fill_random()
    times = session.measure([Leg("run", execution.run)], options["num_rounds"])
    session.close()
    median = median_of(times.slowest("run"))
    return RunResult(
        program=program.name,
        ranks=problem.num_ranks,
        streams=len(execution.stream_numbers),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        right=all(verdicts),
        time_ms=median.value,
        low_ms=median.low,
        high_ms=median.high,
        rounds=options["num_rounds"],
    )


def run_text(result: RunResult) -> str:
    verdict = "the reference's bits on every rank" if result.right else "WRONG: differs from the reference"
    return (
        f"{result.program}   {result.ranks} x {result.device}   {result.streams} streams\n{verdict}\n"
        f"{result.time_ms:.3f} ms ({result.low_ms:.3f}..{result.high_ms:.3f}),"
        f" median of {result.rounds} rounds, slowest rank"
    )


@contextmanager
def ranks() -> Iterator[torch.device]:
    """The process group of torchrun, or of this process alone; destroyed at the end.

    What a user can fix is the same on all ranks: rank 0 prints it, the others leave with the same code.
    """
    for name, value in MULTICAST_OFF.items():
        os.environ.setdefault(name, value)
    device = local_device()
    backend = "nccl" if device.type == "cuda" else "gloo"
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


def refuse_long_multiply(problem: Problem, device: torch.device) -> None:
    """Raise HostProgramError, on all ranks, where a CPU would take minutes or hours for a comparison."""
    if device.type != "cpu":
        return
    inner, columns = problem.w_shape
    rows, width, depth = (min(*pair) for pair in zip((problem.m, columns, inner), SAMPLE, strict=True))
    a, w = torch.ones(rows, depth, dtype=problem.dtype), torch.ones(depth, width, dtype=problem.dtype)
    a @ w  # the first one also sets threads up
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


def problem_of(op: str, options: dict[str, Any]) -> Problem:
    """The problem of the command's options on these ranks."""
    return Problem(
        op, options["m"], options["n"], options["k"], DTYPES[options["dtype"]], dist.get_world_size()
    )
