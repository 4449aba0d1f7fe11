"""Legs: other programs over a workload's work, timed in turn with its iteration."""

import time
from collections.abc import Callable

from aorta.queues.harness.iterations.bench import WorkloadBench

ITERATION = "iteration"
PIECE_ROUNDS = 5


def time_legs(ready: WorkloadBench) -> dict[str, list[float]]:
    """Fork to join of every leg and of the iteration, one of each a round; {} where there are no legs.

    Rounds in one process see the same clocks, heat and neighbours, so that differences within a round are
    those between the programs. The pieces of some further rounds are added to the context.
    """
    plan, context = ready.plan, ready.workload.context
    legs: dict[str, Callable[[int], None]] = dict(ready.workload.legs())
    if not legs or not plan.leg_rounds:
        return {}
    works = {ITERATION: ready.workload.iteration, **legs}
    for name in works:
        ready.time_once(works[name])  # a leg's first run may compile or allocate
    names = list(works)
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(_num_rounds(ready, works)):
        for place in range(len(names)):
            name = names[(turn + place) % len(names)]  # no leg always runs after the same one
            times[name].append(ready.time_once(works[name]))
    for name in legs if plan.piece_iterations else ():
        ready.recorder.start(name)
        try:
            for _ in range(min(plan.piece_iterations, PIECE_ROUNDS)):
                ready.time_once(works[name])
        finally:
            context.pieces.extend(ready.recorder.stop().pieces)
    return times


def _num_rounds(ready: WorkloadBench, works: dict[str, Callable[[int], None]]) -> int:
    """Within the budget: the same number on every rank."""
    plan = ready.plan
    if plan.budget_s is None:
        return plan.leg_rounds
    began_s = time.perf_counter()
    for work in works.values():
        ready.time_once(work)
    return ready.affordable(plan.leg_rounds, time.perf_counter() - began_s)
