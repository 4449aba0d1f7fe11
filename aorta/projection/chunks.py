"""Seconds of one micro-batch through one chunk of a pipeline rank, forward and backward.

With --ep-overlap the forward pass of one micro-batch runs beside the backward pass of another, layer by
layer, so that the tokens of each travel to and from the experts while the other computes. Order on the
streams, one layer of each pass:

    all-to-all   combine'            dispatch, dispatch'            combine
    compute      attention           experts', experts              attention'

(' marks the backward pass). Source of the order: Megatron Core, combined 1F1B schedule (2025).
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from aorta.projection import passes
from aorta.projection.model import Model
from aorta.projection.ops import CollectiveOp
from aorta.projection.passes import DataParallel
from aorta.projection.pipeline import Chunk
from aorta.projection.plan import Plan
from aorta.projection.prices import Priced, Pricer
from aorta.projection.stages import Stage, Unit, host_cost, launch_s
from aorta.projection.streams import (
    Lanes,
    StreamRun,
    StreamTask,
    at_least,
    merged,
    run,
    summed,
    waiting,
)

OFFLOAD = "offload"
"""Category of waits for copies of activations to and from the host."""
KERNELS = frozenset({"gemm", "attention", "elementwise", "fp8_cast"})
"""Categories of what runs on compute units alone."""
Parts = tuple[Sequence[Priced], Priced, Sequence[Priced], Priced, Sequence[Priced]]


class TimedChunk(NamedTuple):
    """Times of one micro-batch through one chunk."""

    chunk: Chunk
    middle: StreamRun
    """Both passes, as they are in the middle of the schedule."""
    launch_s: float
    """Host time to launch one micro-batch."""


def timed_chunks(
    model: Model, grid: list[list[Stage]], plan: Plan, pricer: Pricer
) -> dict[tuple[int, ...], TimedChunk]:
    """Equal chunks are timed once."""
    timed: dict[tuple[int, ...], TimedChunk] = {}
    for row in grid:
        for stage in row:
            if chunk_key(stage) not in timed:
                timed[chunk_key(stage)] = _chunk(model, stage, plan, pricer)
    return timed


def chunk_key(stage: Stage) -> tuple[int, ...]:
    """Equal for chunks of the very same units: `build` makes each kind of layer once per projection."""
    return (stage.first is not None, stage.last is not None, *map(id, stage.blocks))


def _chunk(model: Model, stage: Stage, plan: Plan, pricer: Pricer) -> TimedChunk:
    """Times one micro-batch through one chunk, each pass by itself; gradients are exchanged elsewhere."""
    saved = 0.0
    waits = offload_waits_s(stage, pricer)
    host_s = launch_s(model, stage, plan, pricer)
    if plan.is_fsdp:
        pass_lanes = _fsdp_lanes(stage, plan, pricer)
        forward, backward = (
            _what_if(run(lanes.tasks, pricer.contention), lanes.tasks, plan) for lanes in pass_lanes
        )
        middle = summed([(forward, 1), (backward, 1)])
    else:
        # Nothing reaches from one unit into the next, so that equal ones are timed once.
        counts = Counter(id(unit) for unit in stage.units)
        units = {id(unit): unit for unit in stage.units}
        parts = [(_unit_runs(model, unit, plan, pricer), counts[key]) for key, unit in units.items()]
        forward = summed([(runs[0], count) for runs, count in parts])
        backward = summed([(runs[1], count) for runs, count in parts])
        middle = summed([(runs[2], count) for runs, count in parts])
        saved = max(0.0, forward.total_s + backward.total_s - middle.total_s)
    if any(waits):
        forward, backward = (
            summed([(forward, 1), (waiting(waits[0], OFFLOAD), 1)]),
            summed([(backward, 1), (waiting(waits[1], OFFLOAD), 1)]),
        )
        middle = summed([(middle, 1), (waiting(sum(waits), OFFLOAD), 1)])
    weight = 0.0
    if plan.schedule == "zero-bubble":
        weight = sum(
            priced.seconds for unit in stage.units for priced in unit.backward if priced.op.phase == "wgrad"
        )
        weight = min(weight, backward.total_s)
    chunk = Chunk(forward.total_s, backward.total_s - weight, weight, saved)
    return TimedChunk(chunk, middle, host_s)


def _fsdp_lanes(stage: Stage, plan: Plan, pricer: Pricer) -> tuple[Lanes, Lanes]:
    """Forward and backward pass of a chunk, weights gathered and gradients reduced beside them."""
    exchange = DataParallel(plan, pricer)
    forward_lanes, backward_lanes = Lanes(), Lanes()
    passes.forward(forward_lanes, stage, exchange, plan, True)
    passes.backward(backward_lanes, stage, exchange, plan, True)
    return forward_lanes, backward_lanes


def _unit_lanes(ops: Sequence[Priced], plan: Plan) -> Lanes:
    """One pass through one unit."""
    lanes = Lanes()
    lanes.add(ops, plan)
    lanes.flush()
    return lanes


def _unit_runs(
    model: Model, unit: Unit, plan: Plan, pricer: Pricer
) -> tuple[StreamRun, StreamRun, StreamRun]:
    """Runs the forward and the backward pass of one unit, and both as in the middle of the schedule."""
    cached = pricer.unit_runs.get(id(unit))
    if cached is None:
        runs = []
        experts_s = host_cost(model, plan, pricer).experts_s if unit.expert_params else 0.0
        for ops, share in ((unit.forward, 1 / 3), (unit.backward, 2 / 3)):
            tasks = _unit_lanes(ops, plan).tasks
            runs.append(at_least(run(tasks, pricer.contention), experts_s * share))
        paired = paired_run(unit, plan, pricer) if plan.ep_overlap else None
        paired = at_least(paired, experts_s) if paired is not None else None
        middle = summed([(runs[0], 1), (runs[1], 1)])
        if paired is not None and paired.total_s < middle.total_s:
            middle = paired
        cached = pricer.unit_runs[id(unit)] = (unit, (runs[0], runs[1], middle))
    return cached[1]


def paired_run(unit: Unit, plan: Plan, pricer: Pricer) -> StreamRun | None:
    """Runs one layer of both passes side by side; None for a layer without an exchange of tokens.

    Takes what the third layer adds to a chain of two, so that the ends of the chain do not count.
    """
    forward, backward = _parts(unit.forward), _parts(unit.backward)
    if forward is None or backward is None:
        return None
    two, three = (_chain(forward, backward, plan, pricer, count) for count in (2, 3))
    return StreamRun(
        [0.0],
        [three.total_s - two.total_s],
        _difference(three.compute_s, two.compute_s),
        three.slowed_s - two.slowed_s,
        _difference(three.stalled_s, two.stalled_s),
    )


def _parts(ops: Sequence[Priced]) -> Parts | None:
    """Operations before, between and after the two exchanges of a pass; None without exchanges."""
    exchanges = [
        number for number, (op, *_) in enumerate(ops) if isinstance(op, CollectiveOp) and op.axis == "ep"
    ]
    if len(exchanges) != 2:
        return None
    first, second = exchanges
    return ops[:first], ops[first], ops[first + 1 : second], ops[second], ops[second + 1 :]


def _chain(forward: Parts, backward: Parts, plan: Plan, pricer: Pricer, count: int) -> StreamRun:
    lanes = Lanes()
    attention, dispatch, experts, combine, epilogue = forward
    before_grad, combine_grad, experts_grad, dispatch_grad, attention_grad = backward

    def compute(ops: Sequence[Priced], needs: int | None = None) -> tuple[int, ...]:
        lanes.flush()
        if needs is not None:
            lanes.need(needs)
        lanes.add(ops, plan)
        return lanes.flush()

    combined: int | None = None
    for _ in range(count):
        grads_out = lanes.communicate(combine_grad, compute(before_grad))
        if combined is not None:
            compute(epilogue, combined)
        tokens_out = lanes.communicate(dispatch, compute(attention))
        grads_back = lanes.communicate(dispatch_grad, compute(experts_grad, grads_out))
        combined = lanes.communicate(combine, compute(experts, tokens_out))
        compute(attention_grad, grads_back)
    compute(epilogue, combined)
    return run(lanes.tasks, pricer.contention)


def _difference(larger: dict[str, float], smaller: dict[str, float]) -> dict[str, float]:
    return merged(larger, {category: -seconds for category, seconds in smaller.items()})


def offload_waits_s(stage: Stage, pricer: Pricer) -> tuple[float, float]:
    """Waits of one micro-batch's forward and backward pass for copies to and from the host.

    The copies run beside the kernels of the pass and slow none of them (measured for GEMMs on one H200):
    max(0, bytes / sustained rate of the host's link - kernels of the pass), each direction for itself.
    """
    if not stage.offloaded_bytes or OFFLOAD in pricer.disabled_terms:
        return 0.0, 0.0
    copy_s = stage.offloaded_bytes / pricer.hardware.host_link.sustained_bytes_per_s
    forward_s = sum(_kernels_s(unit.forward) for unit in stage.blocks)
    backward_s = sum(_kernels_s(unit.backward) for unit in stage.blocks)
    return max(0.0, copy_s - forward_s), max(0.0, copy_s - backward_s)


def _kernels_s(ops: Sequence[Priced]) -> float:
    return sum(priced.seconds for priced in ops if priced.category in KERNELS)


def _what_if(simulated: StreamRun, tasks: Sequence[StreamTask], plan: Plan) -> StreamRun:
    """The pass with the share of FSDP's collectives hidden that the plan asks for."""
    if plan.fsdp_overlap is None:
        return simulated
    stalls = simulated.stalled_s | {"dp_comm": (1 - plan.fsdp_overlap) * exchange_s(tasks)}
    total = sum(simulated.compute_s.values()) + sum(stalls.values())
    return StreamRun([0.0], [total], simulated.compute_s, 0.0, stalls)


def exchange_s(tasks: Sequence[StreamTask]) -> float:
    """Seconds of all gathers of weights and reductions of gradients, alone on the network."""
    return sum(task.seconds for task in tasks if task.category == "dp_comm")
