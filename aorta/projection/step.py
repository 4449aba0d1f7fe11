"""What a step costs: the pipeline of stages, each a timeline of streams, then optimizer and host."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from aorta.hardware import Hardware
from aorta.projection.job.layer_split import split_layers
from aorta.projection.job.model import Model
from aorta.projection.job.plan import Plan
from aorta.projection.memory import offloaded_bytes
from aorta.projection.pricing import Factors, Priced, Pricer
from aorta.projection.schedule import pipeline
from aorta.projection.schedule import stage as stages
from aorta.projection.schedule.pairing import paired_run
from aorta.projection.schedule.pipeline import Chunk
from aorta.projection.schedule.stage import DataParallel, Lanes, Stage, Unit
from aorta.projection.spread import Widening, bounds, widenings
from aorta.projection.work.lanes import HOST, StreamRun, StreamTask, merged, run, waits
from aorta.projection.work.layers import BF16
from aorta.projection.work.ops import CollectiveOp

NODE = 8
OFFLOAD = "offload"
KERNELS = frozenset({"gemm", "attention", "elementwise", "fp8_cast"})
"""Categories of what runs on compute units alone."""
HOST_BOUND_SHARE = 0.97
"""A step is called host-bound when the host needs this share of the device's time or more."""


class Projection(NamedTuple):
    """A step. The breakdown adds up to step_s."""

    model: Model
    plan: Plan
    hardware: Hardware
    step_s: float
    low_s: float
    high_s: float
    breakdown_s: dict[str, float]
    device_s: float
    host_s: float
    factors: Factors
    tasks: tuple[StreamTask, ...]
    """Of rank 0 (pp 1) or of one micro-batch of its first chunk, with `run`; for the Timeline."""
    run: StreamRun
    stage: Stage
    widenings: tuple[Widening, ...] = ()
    """Why the interval is as wide as it is."""

    @property
    def host_bound(self) -> bool:
        return self.host_s >= HOST_BOUND_SHARE * self.device_s

    @property
    def tokens_per_s_per_gpu(self) -> float:
        return self.plan.global_batch_size * self.plan.seq_len / self.step_s / self.plan.world_size

    @property
    def tokens_interval(self) -> tuple[float, float]:
        """Tokens per second and GPU at the slow and at the fast end of the interval."""
        tokens, step_s = self.tokens_per_s_per_gpu, self.step_s
        return tokens * step_s / self.high_s, tokens * step_s / self.low_s

    @property
    def model_flops_per_s(self) -> float:
        """Per GPU: what the task needs. Recomputation and LoRA's adapters, which are not priced, stay out."""
        frozen = self.plan.task == "lora"
        return self.tokens_per_s_per_gpu * self.model.train_flops_per_token(self.plan.seq_len, frozen)


def project(model: Model, plan: Plan, pricer: Pricer) -> Projection:
    """Seconds of one step of the slowest rank."""
    plan.check(model)
    pricer = pricer.with_plan(plan)
    return _pipelined(model, plan, pricer) if plan.pp > 1 else _single(model, plan, pricer)


def _single(model: Model, plan: Plan, pricer: Pricer) -> Projection:
    stage = _built(model, plan, pricer, range(model.num_layers), True, True)
    num_micro_batches = plan.num_micro_batches
    # A first, a middle and a last one; all are alike where each gathers and reduces.
    num_simulated = min(num_micro_batches, 2 if plan.is_fsdp and plan.grad_sync == "each" else 3)
    lanes, marks = micro_batches(model, stage, plan, pricer, num_simulated)
    simulated = run(lanes.tasks, pricer.factors.contention)
    repeated = num_micro_batches - num_simulated
    period = (
        _between(lanes.tasks, simulated, marks[0], marks[1]) if repeated else StreamRun([], [], {}, 0.0, {})
    )
    work = merged(simulated.compute_s, _scaled(period.compute_s, repeated))
    stalls = merged(simulated.stalled_s, _scaled(period.stalled_s, repeated))
    if repeated:
        period_s = period.end_s[0] - period.start_s[0]
        issued = sum(task.issue_s for task in lanes.tasks[marks[0] : marks[1]])
        if period_s < issued:  # the device catches up on the host, and cannot for ever
            last, _ = micro_batches(model, stage, plan, pricer, num_micro_batches, num_micro_batches - 1)
            paced_s = (num_micro_batches - 1) * issued + run(last.tasks, pricer.factors.contention).total_s
            waits_s = paced_s - simulated.total_s - repeated * period_s
            stalls = merged(stalls, {HOST: max(0.0, waits_s)})
    slowed = simulated.slowed_s + repeated * period.slowed_s
    if plan.fsdp_overlap is not None:
        total = _exchange_s(lanes.tasks)
        if repeated:
            total += repeated * _exchange_s(lanes.tasks[marks[0] : marks[1]])
        stalls["dp_comm"] = (1 - plan.fsdp_overlap) * total
        slowed = 0.0
    waits_s = sum(offload_waits_s(stage, pricer)) * num_micro_batches
    if waits_s:
        stalls = merged(stalls, {OFFLOAD: waits_s})
    host_s = _host_s(model, stage, plan, pricer) * num_micro_batches
    parts = StepParts(work, stalls, slowed, 0.0, host_s, *_params([stage]))
    return _assemble(model, plan, pricer, parts, Shown(lanes.tasks, simulated, stage))


def _exchange_s(tasks: Sequence[StreamTask]) -> float:
    """Of all gathers of weights and reductions of gradients, alone on the network."""
    return sum(task.seconds for task in tasks if task.category == "dp_comm")


def _pipelined(model: Model, plan: Plan, pricer: Pricer) -> Projection:
    grid = build_stages(model, plan, pricer)
    exchange = DataParallel(plan, pricer)
    timed = _timed(model, grid, plan, pricer)
    chunks = [[timed[_key(stage)].chunk for stage in row] for row in grid]
    p2p_s = transfer_s(model, plan, pricer)
    m = plan.num_micro_batches
    zero_bubble = plan.schedule == "zero-bubble"
    total = pipeline.duration_s(chunks, m, p2p_s, zero_bubble)
    slowest = max(range(plan.pp), key=lambda rank: sum(chunk.total_s for chunk in chunks[rank]))
    row = grid[slowest]
    work: dict[str, float] = {}
    stalls: dict[str, float] = {}
    slowed = 0.0
    for stage in row:
        middle = timed[_key(stage)].middle
        work = merged(work, _scaled(middle.compute_s, m))
        stalls = merged(stalls, _scaled(middle.stalled_s, m))
        slowed += m * middle.slowed_s
    bubble = total - sum(work.values()) - sum(stalls.values()) - slowed
    exposed = max(
        _edges(row, chunks, plan, pricer, exchange)
        for row in {tuple(_key(stage) for stage in row): row for row in grid}.values()
    )
    stalls["dp_comm"] = stalls.get("dp_comm", 0.0) + exposed
    dense, expert = max((_params(row) for row in grid), key=sum)
    host_s = sum(_host_s(model, stage, plan, pricer) for stage in row) * m
    parts = StepParts(work, stalls, slowed, bubble, host_s, dense, expert)
    first = timed[_key(row[0])]
    return _assemble(model, plan, pricer, parts, Shown(first.tasks, first.forward, row[0]))


def transfer_s(model: Model, plan: Plan, pricer: Pricer) -> float:
    """Seconds from one pipeline stage to the next."""
    size = float(plan.tokens) * model.hidden * BF16 / (plan.tp if plan.sequence_parallel else 1)
    return pricer.price(CollectiveOp("stage_to_stage", "forward", "send_recv", "pp", size)).seconds


Placed = tuple[StreamTask, float, float]
"""A task with start and end in seconds."""


def chunk_tasks(stage: Stage, plan: Plan, pricer: Pricer) -> tuple[list[Placed], list[Placed]]:
    """Tasks of one micro-batch's forward and backward pass through a chunk, each pass from 0."""
    if plan.is_fsdp:
        exchange = DataParallel(plan, pricer)
        forward_lanes, backward_lanes = Lanes(), Lanes()
        stages.forward(forward_lanes, stage, exchange, plan, True)
        stages.backward(backward_lanes, stage, exchange, plan, True)
        return _placed([forward_lanes], pricer), _placed([backward_lanes], pricer)
    lanes: tuple[list[Lanes], list[Lanes]] = ([], [])
    for unit in stage.units:
        for pass_lanes, ops in zip(lanes, (unit.forward, unit.backward), strict=True):
            pass_lanes.append(Lanes())
            pass_lanes[-1].add(ops, plan)
            pass_lanes[-1].flush()
    return _placed(lanes[0], pricer), _placed(lanes[1][::-1], pricer)


def _placed(parts: list[Lanes], pricer: Pricer) -> list[Placed]:
    """One part after the other."""
    placed: list[Placed] = []
    begin = 0.0
    for lanes in parts:
        times = run(lanes.tasks, pricer.factors.contention)
        placed += [
            (task, begin + start, begin + end)
            for task, start, end in zip(lanes.tasks, times.start_s, times.end_s, strict=True)
        ]
        begin += times.total_s
    return placed


def chunk_times(model: Model, grid: list[list[Stage]], plan: Plan, pricer: Pricer) -> list[list[Chunk]]:
    """Seconds of every chunk for one micro-batch."""
    timed = _timed(model, grid, plan, pricer)
    return [[timed[_key(stage)].chunk for stage in row] for row in grid]


class _Timed(NamedTuple):
    """One micro-batch through one chunk."""

    chunk: Chunk
    forward: StreamRun
    middle: StreamRun
    """Both passes, as they are in the middle of the schedule."""
    tasks: list[StreamTask]


def _timed(
    model: Model, grid: list[list[Stage]], plan: Plan, pricer: Pricer
) -> dict[tuple[int, ...], _Timed]:
    """Equal chunks are timed once."""
    timed: dict[tuple[int, ...], _Timed] = {}
    for row in grid:
        for stage in row:
            if _key(stage) not in timed:
                timed[_key(stage)] = _chunk(model, stage, plan, pricer)
    return timed


def _key(stage: Stage) -> tuple[int, ...]:
    """Equal for chunks of the very same units: `build` makes each kind of layer once per projection."""
    return (stage.first is not None, stage.last is not None, *map(id, stage.blocks))


def build_stages(model: Model, plan: Plan, pricer: Pricer) -> list[list[Stage]]:
    """Chunks of every pipeline rank. Where layers do not divide, embedding and output stand for one each."""
    number = plan.pp * plan.vpp
    counts = split_layers(model.num_layers, number, plan.first_stage_layers, plan.last_stage_layers, ends=2)
    built: list[Stage] = []
    begin = 0
    for position, count in enumerate(counts):
        block_range = range(begin, begin + count)
        built.append(_built(model, plan, pricer, block_range, position == 0, position == number - 1))
        begin += count
    return [[built[chunk * plan.pp + rank] for chunk in range(plan.vpp)] for rank in range(plan.pp)]


def _built(model: Model, plan: Plan, pricer: Pricer, block_range: range, first: bool, last: bool) -> Stage:
    stage = stages.build(model, plan, pricer, block_range, first, last)
    return stage._replace(offloaded_bytes=offloaded_bytes(model, plan, block_range))


def offload_waits_s(stage: Stage, pricer: Pricer) -> tuple[float, float]:
    """What the forward and the backward pass of one micro-batch wait for copies to and from the host.

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


def micro_batches(
    model: Model, stage: Stage, plan: Plan, pricer: Pricer, count: int, skipped: int = 0
) -> tuple[Lanes, list[int]]:
    """Forward and backward of some micro-batches, the last with the exchange of gradients; the first
    `skipped` of them are over already.

    FSDP gathers and reduces in each; other shardings gather in the first and reduce in the last.
    """
    lanes, marks = Lanes(), list[int]()
    host = stages.host_cost(model, plan, pricer)
    exchange = DataParallel(plan, pricer)
    sharded_weights = plan.sharding != "ddp" and plan.shard_ranks > 1
    for number in range(skipped, count):
        gathers = plan.is_fsdp or (number == 0 and sharded_weights and plan.dp_overlap)
        last = number == count - 1
        syncs_each = plan.is_fsdp and plan.grad_sync == "each"
        reduces = syncs_each or (last and (plan.is_fsdp or plan.dp_overlap))
        if number == 0 and sharded_weights and not plan.dp_overlap:
            exchange.all_at_once(lanes, stage, True)
        stages.forward(lanes, stage, exchange, plan, gathers, lanes.flush(), host)
        stages.backward(lanes, stage, exchange, plan, reduces, host)
        if number == count - 1 and not plan.dp_overlap:
            exchange.all_at_once(lanes, stage, False)
        marks.append(len(lanes.tasks))
    return lanes, marks


def _between(tasks: list[StreamTask], simulated: StreamRun, first: int, last: int) -> StreamRun:
    """What the micro-batch of tasks[first:last] adds to the compute stream."""
    compute = [i for i in range(len(tasks)) if tasks[i].stream == "compute"]
    begin = max((simulated.end_s[i] for i in compute if i < first), default=0.0)
    inside = [i for i in compute if first <= i < last]
    end = simulated.end_s[inside[-1]]
    work = merged(*({category: s} for i in inside for _, category, s in tasks[i].parts))
    slowed = sum(simulated.end_s[i] - simulated.start_s[i] - tasks[i].seconds for i in inside)
    stalls: dict[str, float] = {}
    previous = begin
    for i in inside:
        if simulated.start_s[i] > previous:
            for cause, seconds in waits(tasks, i, previous, simulated.start_s, simulated.end_s):
                stalls = merged(stalls, {cause: seconds})
        previous = simulated.end_s[i]
    assert abs(sum(work.values()) + sum(stalls.values()) + slowed - (end - begin)) < 1e-6
    return StreamRun([begin], [end], work, slowed, stalls)


def _chunk(model: Model, stage: Stage, plan: Plan, pricer: Pricer) -> _Timed:
    """One micro-batch through one chunk, forward and backward apart; gradients are exchanged elsewhere."""
    saved = 0.0
    if plan.is_fsdp:
        exchange = DataParallel(plan, pricer)
        forward_lanes, backward_lanes = Lanes(), Lanes()
        stages.forward(forward_lanes, stage, exchange, plan, True)
        stages.backward(backward_lanes, stage, exchange, plan, True)
        tasks = forward_lanes.tasks
        forward, backward = (
            _what_if(run(lanes.tasks, pricer.factors.contention), lanes.tasks, plan)
            for lanes in (forward_lanes, backward_lanes)
        )
        middle = _sum([(forward, 1), (backward, 1)])
    else:
        # Nothing reaches from one unit into the next, so that equal ones are timed once.
        counts = Counter(id(unit) for unit in stage.units)
        units = {id(unit): unit for unit in stage.units}
        parts = [(_unit_runs(model, unit, plan, pricer), counts[key]) for key, unit in units.items()]
        forward = _sum([(runs[0], count) for runs, count in parts])
        backward = _sum([(runs[1], count) for runs, count in parts])
        middle = _sum([(runs[2], count) for runs, count in parts])
        saved = max(0.0, forward.total_s + backward.total_s - middle.total_s)
        tasks = []
    waits = offload_waits_s(stage, pricer)
    if any(waits):
        forward, backward = (
            _sum([(forward, 1), (_waiting(waits[0]), 1)]),
            _sum([(backward, 1), (_waiting(waits[1]), 1)]),
        )
        middle = _sum([(middle, 1), (_waiting(sum(waits)), 1)])
    weight = 0.0
    if plan.schedule == "zero-bubble":
        weight = sum(
            priced.seconds for unit in stage.units for priced in unit.backward if priced.op.phase == "wgrad"
        )
        weight = min(weight, backward.total_s)
    return _Timed(Chunk(forward.total_s, backward.total_s - weight, weight, saved), forward, middle, tasks)


def _waiting(seconds: float) -> StreamRun:
    """A wait for copies to or from the host."""
    return StreamRun([0.0], [seconds], {}, 0.0, {OFFLOAD: seconds})


def _what_if(simulated: StreamRun, tasks: Sequence[StreamTask], plan: Plan) -> StreamRun:
    """The pass with the share of FSDP's collectives hidden that the plan asks for."""
    if plan.fsdp_overlap is None:
        return simulated
    stalls = simulated.stalled_s | {"dp_comm": (1 - plan.fsdp_overlap) * _exchange_s(tasks)}
    total = sum(simulated.compute_s.values()) + sum(stalls.values())
    return StreamRun([0.0], [total], simulated.compute_s, 0.0, stalls)


def _unit_runs(
    model: Model, unit: Unit, plan: Plan, pricer: Pricer
) -> tuple[StreamRun, StreamRun, StreamRun]:
    """Forward and backward of one unit, and both as they are in the middle of the schedule."""
    cached = pricer.unit_runs.get(id(unit))
    if cached is None:
        runs = []
        experts_s = stages.host_cost(model, plan, pricer).experts_s if unit.expert_params else 0.0
        for ops, share in ((unit.forward, 1 / 3), (unit.backward, 2 / 3)):
            lanes = Lanes()
            lanes.add(ops, plan)
            lanes.flush()
            runs.append(_at_least(run(lanes.tasks, pricer.factors.contention), experts_s * share))
        paired = paired_run(unit, plan, pricer) if plan.ep_overlap else None
        paired = _at_least(paired, experts_s) if paired is not None else None
        middle = _sum([(runs[0], 1), (runs[1], 1)])
        if paired is not None and paired.total_s < middle.total_s:
            middle = paired
        cached = pricer.unit_runs[id(unit)] = (unit, (runs[0], runs[1], middle))
    return cached[1]


def _at_least(simulated: StreamRun, host_s: float) -> StreamRun:
    """The run, and what it waits for a host that takes longer and cannot run ahead."""
    waits_s = host_s - simulated.total_s
    if waits_s <= 0:
        return simulated
    return StreamRun(
        [0.0], [host_s], simulated.compute_s, simulated.slowed_s, merged(simulated.stalled_s, {HOST: waits_s})
    )


def _sum(parts: list[tuple[StreamRun, int]]) -> StreamRun:
    """Runs one after the other, each some number of times."""
    return StreamRun(
        [0.0],
        [sum(part.total_s * count for part, count in parts)],
        merged(*(_scaled(part.compute_s, count) for part, count in parts)),
        sum(part.slowed_s * count for part, count in parts),
        merged(*(_scaled(part.stalled_s, count) for part, count in parts)),
    )


def _edges(
    row: list[Stage], chunks: list[list[Chunk]], plan: Plan, pricer: Pricer, exchange: DataParallel
) -> float:
    """Seconds of weight gathers before the first micro-batch and of gradient reductions after the last
    that nothing hides.

    Under them run the first forward and the last backward of each chunk, spread over the pipeline's fill and
    drain: a round of pp micro-batches of the other chunks, or one micro-batch of this one.
    """
    if plan.is_fsdp or plan.world_size == plan.pp * plan.tp:
        return 0.0
    rounds = min(plan.num_micro_batches, plan.pp) if plan.vpp > 1 else 1
    slowest = max(sum(chunk.total_s for chunk in stage) for stage in chunks) / plan.vpp
    share = min(chunk.forward_s / chunk.total_s for stage in chunks for chunk in stage if chunk.total_s > 0)
    exposed = 0.0
    slow = pricer.factors.contention_communication
    for reduces in (False, True):
        seconds = []
        for stage in row:
            lanes = Lanes()
            for unit in stage.units:
                if reduces:
                    exchange.reduce(lanes, unit, None)
                elif plan.sharding != "ddp":
                    exchange.gather(lanes, unit, ())
            seconds.append(
                [
                    (task.seconds, max(1.0, slow * task.link_share))
                    for task in lanes.tasks
                    if task.stream != "compute"
                ]
            )
        window = slowest * ((1 - share) if reduces else share)
        clock = 0.0
        # The last (or first) bucket of the rank has nothing left to hide behind.
        for number, parts in enumerate(seconds):
            edge = number == len(seconds) - 1
            hidden = sum(alone * slowed for alone, slowed in (parts[1:] if edge else parts))
            room = window * (rounds if not edge else 1) if plan.dp_overlap else 0.0
            clock = max(0.0, clock + hidden - room)
            if edge and parts:
                clock += parts[0][0]
        exposed += clock
    return exposed


class StepParts(NamedTuple):
    """Seconds that add up to a step before stragglers, and parameters of the rank for its optimizer."""

    work: dict[str, float]
    stalls: dict[str, float]
    slowed: float
    bubble: float
    host_s: float
    """Time to launch everything, whether the device waits for it or not."""
    dense_params: float
    expert_params: float


class Shown(NamedTuple):
    """The micro-batch that a projection keeps for pictures and records."""

    tasks: list[StreamTask]
    run: StreamRun
    stage: Stage


def _assemble(model: Model, plan: Plan, pricer: Pricer, parts: StepParts, sample: Shown) -> Projection:
    breakdown, stalls = dict(parts.work), dict(parts.stalls)
    breakdown["host"] = stalls.pop(HOST, 0.0)
    for category, seconds in stalls.items():
        name = f"exposed_{category}"
        breakdown[name] = breakdown.get(name, 0.0) + seconds
    breakdown["contention"] = parts.slowed
    if plan.pp > 1:
        breakdown["pipeline_bubble"] = parts.bubble
    breakdown["optimizer"] = stages.optimizer_s(parts.dense_params, parts.expert_params, plan, pricer)
    device_s = sum(breakdown.values()) - breakdown["host"]
    if "host" not in pricer.disabled_terms:
        breakdown["host"] = max(breakdown["host"], parts.host_s - device_s)
    breakdown["stragglers"] = straggler_share(plan.world_size, pricer) * sum(breakdown.values())
    device_s += breakdown["stragglers"]
    step_s = sum(breakdown.values())
    reasons = widenings(model, plan, pricer.hardware, breakdown)
    low_s, high_s = bounds(step_s, reasons)
    factors = pricer.factors
    return Projection(
        model,
        plan,
        pricer.hardware,
        step_s,
        low_s,
        high_s,
        breakdown,
        device_s,
        parts.host_s,
        factors,
        tuple(sample.tasks),
        sample.run,
        sample.stage,
        tuple(reasons),
    )


def straggler_share(num_gpus: int, pricer: Pricer) -> float:
    """What waiting for the slowest of many GPUs adds beyond the eight of a node, which measured steps have in
    them already.

    The largest of N independent normal deviations lies about sqrt(2 ln N) standard deviations above the mean.
    """
    if num_gpus <= NODE or "stragglers" in pricer.disabled_terms:
        return 0.0
    return pricer.factors.straggler * (math.sqrt(2 * math.log(num_gpus)) - math.sqrt(2 * math.log(NODE)))


def _host_s(model: Model, stage: Stage, plan: Plan, pricer: Pricer) -> float:
    """Host time to launch one micro-batch of a chunk."""
    host = stages.host_cost(model, plan, pricer)
    total = len(stage.blocks) * host.unit_s
    for unit in stage.units:
        launches = sum(priced.op.launches for priced in (*unit.forward, *unit.backward))
        total += launches * (host.of_block(unit) if unit in stage.blocks else host.other_s)
    return total


def _params(row: list[Stage]) -> tuple[float, float]:
    units: list[Unit] = [unit for stage in row for unit in stage.units]
    return sum(unit.dense_params for unit in units), sum(unit.expert_params for unit in units)


def _scaled(seconds: dict[str, float], times: float) -> dict[str, float]:
    return {category: value * times for category, value in seconds.items()}
