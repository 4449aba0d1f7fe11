"""Run of one host program on the ranks of this job: its result is checked bit for bit, then it is timed."""

from typing import Any

import msgspec
import torch
import torch.distributed as dist

from aorta.device.backend import backend_of
from aorta.programs.execute.collectives import gathered
from aorta.programs.execute.executor import Execution, lanes_of, streams_needed
from aorta.programs.execute.problem import bind, expected, in_order_of_ranks, reference
from aorta.programs.execute.session import StrategySession, problem_of
from aorta.programs.execute.timing import Leg, median_of
from aorta.programs.language.expr import HostProgramError
from aorta.programs.language.ir import Program
from aorta.programs.language.text import read_program


class RunResult(msgspec.Struct, frozen=True, kw_only=True):
    """Outcome of a run. Times are medians over rounds of the slowest rank, with a 95 % interval."""

    program: str
    ranks: int
    streams: int
    device: str
    right: bool
    """True if every rank's result, twice, had the bits of the computation without overlap."""
    time_ms: float
    low_ms: float
    high_ms: float
    rounds: int


def run_program(path: str, device: torch.device, options: dict[str, Any]) -> RunResult:
    """Check and time the program in a file. Collective: every rank returns the same result.

    Raises HostProgramError for a file that does not fit these ranks or cannot be run on them.
    """
    program = read_program(path)
    if program.num_ranks != dist.get_world_size():
        raise HostProgramError(
            f"{path} is for {program.num_ranks} ranks, {dist.get_world_size()} are running;"
            f" torchrun --nproc-per-node {program.num_ranks} would start as many"
        )
    if not lanes_of(program):
        raise HostProgramError(f"{path} has no communication: there is nothing to overlap")
    problem = problem_of(program.name, options)
    session = StrategySession(problem, device, streams_needed(program, threads=False))
    execution = _execution(program, session)
    verdicts = gathered(_is_right(execution, session), session.control)
    session.bench.operands.fill_random()
    times = session.measure([Leg("run", execution.run)], options["num_rounds"])
    session.close()
    median = median_of(times.slowest("run"))
    return RunResult(
        program=program.name,
        ranks=problem.num_ranks,
        streams=len(execution.stream_numbers),
        device=backend_of(device).name(device),
        right=all(verdicts),
        time_ms=median.value,
        low_ms=median.low,
        high_ms=median.high,
        rounds=options["num_rounds"],
    )


def _execution(program: Program, session: StrategySession) -> Execution:
    """The program bound to the session's streams and tensors, with a process group per lane. Collective."""
    bench, lanes = session.bench, lanes_of(program)
    # Every rank makes the groups in this order: making one is collective, whether or not a rank uses it.
    groups: dict[str, Any] = {lane: dist.new_group() for lane in lanes[1:]}
    groups |= {lane: bench.group for lane in lanes[:1]}
    tensors = bind(program, bench.operands, bench.arena)
    if session.device.type == "cpu" and len(lanes) > 1:
        raise HostProgramError("on threads a program may have one lane, this one has several")
    return Execution(program, tensors, bench.streams, groups, control=session.control)


def _is_right(execution: Execution, session: StrategySession) -> bool:
    """True if this rank's result has the reference's bits, twice. Collective."""
    problem, operands = session.problem, session.bench.operands
    result = execution.tensors["C"]
    operands.fill_integers()
    product = reference(operands, session.bench.group, bias="b" in execution.program.buffers())
    expected_product = expected(problem, product, session.rank, result.shape[0])
    is_right = True
    for _ in range(2):  # twice: events and works of the first call must not let the second go early
        execution.poison()
        session.watch.finish()
        dist.barrier(group=session.control)
        execution.run()
        session.watch.finish()
        is_right = is_right and torch.equal(in_order_of_ranks(problem, result), expected_product)
    return is_right


def run_text(result: RunResult) -> str:
    """Verdict and time, for the terminal."""
    verdict = "the reference's bits on every rank" if result.right else "WRONG: differs from the reference"
    return (
        f"{result.program}   {result.ranks} x {result.device}   {result.streams} streams\n{verdict}\n"
        f"{result.time_ms:.3f} ms ({result.low_ms:.3f}..{result.high_ms:.3f}),"
        f" median of {result.rounds} rounds, slowest rank"
    )
