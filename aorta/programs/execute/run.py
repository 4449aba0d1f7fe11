"""Run of one host program on the ranks of this job: its order is linted, its result checked bit for bit,
then it is timed.

A result cannot show that a program has no race: the right bits may come by luck. So a racy program is
refused, and where it is run all the same, the answer is in how many rounds the result agreed.
"""

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
from aorta.programs.lint.one_rank import Verdict, lint

NUM_CHECKS = 2
"""Runs that are compared with the reference: events and works of the first must not let the second go
early."""


class RunResult(msgspec.Struct, frozen=True, kw_only=True):
    """Outcome of a run. Times are medians over rounds of the slowest rank, with a 95 % interval."""

    program: str
    ranks: int
    streams: int
    device: str
    right: bool
    """True if every rank's result, each time, had the bits of the computation without overlap, and the
    program has no race."""
    races: int = 0
    """Orders that the program lacks; not 0 only where it was run all the same."""
    rounds_agreed: int | None = None
    """Of a racy program: rounds in which every rank's result agreed; null for one without races."""
    rounds_checked: int = NUM_CHECKS
    time_ms: float
    low_ms: float
    high_ms: float
    rounds: int


def refusal(verdict: Verdict) -> str | None:
    """Why a program is not run: its first race, or ranks that do not meet; None where it has neither."""
    if verdict.rank_mismatches or verdict.fault is None:
        return verdict.fault
    return f"{verdict.fault}; aorta program lint lists them, --unsafe runs it all the same"


def run_program(
    path: str, device: torch.device, options: dict[str, Any], is_unsafe: bool = False
) -> RunResult:
    """Lint, check and time the program in a file. Collective: every rank returns the same result.

    is_unsafe: run it although it has a race. Raises HostProgramError for a file that does not fit these
    ranks or cannot be run on them, and for a race.
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
    session = StrategySession(problem, device, streams_needed(program))
    execution = _execution(program, session)
    verdict = lint(program)
    refused = refusal(verdict)
    if refused is not None and not (is_unsafe and not verdict.rank_mismatches):
        raise HostProgramError(refused)
    num_races = len(verdict.missing_edges)
    num_checks = options["num_rounds"] if num_races else NUM_CHECKS
    agreed = gathered(_agreements(execution, session, num_checks), session.control)
    num_agreed = sum(all(ranks) for ranks in zip(*agreed, strict=True))
    session.bench.operands.fill_random()
    times = session.measure([Leg("run", execution.run)], options["num_rounds"])
    session.close()
    median = median_of(times.slowest("run"))
    return RunResult(
        program=program.name,
        ranks=problem.num_ranks,
        streams=len(execution.stream_numbers),
        device=backend_of(device).name(device),
        right=num_agreed == num_checks and not num_races,
        races=num_races,
        rounds_agreed=num_agreed if num_races else None,
        rounds_checked=num_checks,
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


def _agreements(execution: Execution, session: StrategySession, num_checks: int) -> list[bool]:
    """By run, whether this rank's result had the reference's bits. Collective."""
    problem, operands = session.problem, session.bench.operands
    result = execution.tensors["C"]
    operands.fill_integers()
    product = reference(operands, session.bench.group, bias="b" in execution.program.buffers())
    expected_product = expected(problem, product, session.rank, result.shape[0])
    agreed = []
    for _ in range(num_checks):
        execution.poison()
        session.watch.finish()
        dist.barrier(group=session.control)
        execution.run()
        session.watch.finish()
        agreed.append(torch.equal(in_order_of_ranks(problem, result), expected_product))
    return agreed


def run_text(result: RunResult) -> str:
    """Verdict and time, for the terminal."""
    if result.rounds_agreed is not None:
        races = f"{result.races} race{'s' * (result.races > 1)}"
        rounds = f"{result.rounds_agreed} of {result.rounds_checked} rounds"
        verdict = f"{races}: agreed in {rounds}, which proves nothing"
    elif result.right:
        verdict = "the reference's bits on every rank"
    else:
        verdict = "WRONG: differs from the reference"
    return (
        f"{result.program}   {result.ranks} x {result.device}   {result.streams} streams\n{verdict}\n"
        f"{result.time_ms:.3f} ms ({result.low_ms:.3f}..{result.high_ms:.3f}),"
        f" median of {result.rounds} rounds, slowest rank"
    )
