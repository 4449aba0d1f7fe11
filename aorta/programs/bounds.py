"""Prediction of a program's time: bounds, efficiency, and the causes of the time above the bound."""

from dataclasses import replace

import msgspec

from aorta.programs.language.ir import Program
from aorta.programs.lint.one_rank import lint
from aorta.programs.simulator import Costs, Machine, Ran, duration_us, simulate, timeline
from aorta.timeline.overlap import overlap


class Waterfall(msgspec.Struct, frozen=True, kw_only=True):
    """Parts of the predicted time, which is their sum. Each part is the time that one more cause adds."""

    pipeline_bound_us: float
    dependency_waste_us: float
    """Critical path of the program in its order, with a queue per stream, less the bound."""
    interference_us: float
    """Time because communication and compute slow each other down or find no room, and waits pass late."""
    queue_waste_us: float
    """Time because streams share queues."""
    host_gap_us: float
    """Time because the host is not ahead of the device."""


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """Predicted time of a program on one machine."""

    program: str
    duration_us: float
    comm_us: float
    """Microseconds of all communication slices, alone."""
    compute_us: float
    """Microseconds of all compute slices, alone."""
    serial_us: float
    """comm_us + compute_us."""
    ideal_us: float
    """The longer of comm_us and compute_us: the other is hidden."""
    pipeline_bound_us: float
    """The longer one plus one slice of the other, which no order of these tiles can beat."""
    efficiency: float | None
    """(serial - duration) / (serial - ideal); null where there is nothing to hide."""
    exposed_comm_us: float
    """Microseconds in which the rank communicates and computes nothing."""
    num_tiles: int
    waterfall: Waterfall
    fault: str | None
    """The race, or the hang, that lint finds: what mends it may take longer. Null of a safe program."""


def predict(program: Program, costs: Costs, machine: Machine | None = None, rank: int = 0) -> Prediction:
    """Prediction for one rank of a program on a machine.

    Raises HostProgramError as simulate does.
    """
    machine = machine or Machine()
    # One cause is added per simulation: the order alone, then interference, shared queues, the host.
    alone = replace(costs, host_us=0.0, comm_slowdown=1.0, compute_slowdown=1.0)
    every_queue = replace(machine, num_queues=None)
    path_us = duration_us(simulate(program, alone, Machine(), rank))
    shared_us = duration_us(simulate(program, replace(costs, host_us=0.0), every_queue, rank))
    queued_us = duration_us(simulate(program, replace(costs, host_us=0.0), machine, rank))
    ran = simulate(program, costs, machine, rank)
    total_us = duration_us(ran)
    work = _Work(ran)
    return Prediction(
        program=program.name,
        duration_us=total_us,
        comm_us=work.comm_us,
        compute_us=work.compute_us,
        serial_us=work.comm_us + work.compute_us,
        ideal_us=work.ideal_us,
        pipeline_bound_us=work.pipeline_us,
        efficiency=work.efficiency(total_us),
        exposed_comm_us=(overlap(timeline(ran)).exposed_ms or 0.0) * 1e3,
        num_tiles=work.num_tiles,
        waterfall=Waterfall(
            pipeline_bound_us=work.pipeline_us,
            dependency_waste_us=path_us - work.pipeline_us,
            interference_us=shared_us - path_us,
            queue_waste_us=queued_us - shared_us,
            host_gap_us=total_us - queued_us,
        ),
        fault=lint(program).fault,
    )


class _Work:
    """Sums over slices, each as if alone, and the bounds that follow."""

    def __init__(self, ran: list[Ran]) -> None:
        comm = [kernel.alone_us for kernel in ran if kernel.is_comm]
        compute = [kernel.alone_us for kernel in ran if not kernel.is_comm]
        self.comm_us, self.compute_us = sum(comm), sum(compute)
        self.num_tiles = max(len(comm), len(compute), 1)
        self.ideal_us = max(self.comm_us, self.compute_us)
        self.pipeline_us = self.ideal_us + min(self.comm_us, self.compute_us) / self.num_tiles

    def efficiency(self, total_us: float) -> float | None:
        hideable_us = min(self.comm_us, self.compute_us)
        serial_us = self.comm_us + self.compute_us
        return (serial_us - total_us) / hideable_us if hideable_us > 0 else None
