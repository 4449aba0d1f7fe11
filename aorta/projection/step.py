"""The cost of a step: the pipeline of stages, each a timeline of streams, then optimizer and host.

`project` is what everything else asks: the step, its interval, and the breakdown that adds up to it.
"""

import math
from typing import Any, NamedTuple

from aorta.hardware.part import Hardware
from aorta.projection import passes, pipeline
from aorta.projection.chunks import OFFLOAD, chunk_key, exchange_s, offload_waits_s, timed_chunks
from aorta.projection.interval import Widening, anchored_widenings, bounds, widenings
from aorta.projection.memory import offloaded_bytes
from aorta.projection.model import Model
from aorta.projection.ops import BF16, FP32, CollectiveOp
from aorta.projection.passes import DataParallel, exposed_edges_s
from aorta.projection.plan import Plan, split_layers
from aorta.projection.prices import Anchor, Pricer
from aorta.projection.stages import Stage, Unit, build, host_cost, launch_s
from aorta.projection.streams import HOST, Lanes, StreamRun, StreamTask, merged, run, scaled, waits

NODE = 8
"""GPUs among which measured steps have waited for the slowest already."""
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
    stage: Stage
    """All layers; with a pipeline the first chunk of the slowest rank."""
    widenings: tuple[Widening, ...] = ()
    """Reasons for the width of the interval."""
    anchor: Anchor | None = None
    """The measured step that it starts from."""

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
    def times(self) -> dict[str, Any]:
        """The step, its interval and the rate, as documents hold them."""
        interval_ms = [self.low_s * 1e3, self.high_s * 1e3]
        rate = self.tokens_per_s_per_gpu
        return {"step_ms": self.step_s * 1e3, "interval_ms": interval_ms, "tokens_per_s_per_gpu": rate}

    @property
    def model_flops_per_s(self) -> float:
        """FLOP/s per GPU that the task needs, without recomputation and without LoRA's adapters."""
        plan = self.plan
        flops = self.model.train_flops_per_token(plan.seq_len, plan.task == "lora", plan.mtp)
        return self.tokens_per_s_per_gpu * flops


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
    simulated = run(lanes.tasks, pricer.contention)
    repeated = num_micro_batches - num_simulated
    period = (
        _between(lanes.tasks, simulated, marks[0], marks[1]) if repeated else StreamRun([], [], {}, 0.0, {})
    )
    work = merged(simulated.compute_s, scaled(period.compute_s, repeated))
    stalls = merged(simulated.stalled_s, scaled(period.stalled_s, repeated))
    if repeated:
        # Micro-batches in the middle are alike: one is simulated and counted `repeated` times.
        period_s = period.end_s[0] - period.start_s[0]
        issued = sum(task.issue_s for task in lanes.tasks[marks[0] : marks[1]])
        if period_s < issued:  # the device catches up on the host, and cannot for ever
            last, _ = micro_batches(model, stage, plan, pricer, num_micro_batches, num_micro_batches - 1)
            paced_s = (num_micro_batches - 1) * issued + run(last.tasks, pricer.contention).total_s
            waits_s = paced_s - simulated.total_s - repeated * period_s
            stalls = merged(stalls, {HOST: max(0.0, waits_s)})
    slowed = simulated.slowed_s + repeated * period.slowed_s
    if plan.fsdp_overlap is not None:
        total = exchange_s(lanes.tasks)
        if repeated:
            total += repeated * exchange_s(lanes.tasks[marks[0] : marks[1]])
        stalls["dp_comm"] = (1 - plan.fsdp_overlap) * total
        slowed = 0.0
    waits_s = sum(offload_waits_s(stage, pricer)) * num_micro_batches
    if waits_s:
        stalls = merged(stalls, {OFFLOAD: waits_s})
    host_s = launch_s(model, stage, plan, pricer) * num_micro_batches
    parts = StepParts(work, stalls, slowed, 0.0, host_s, *_params([stage]))
    return _assemble(model, plan, pricer, parts, stage)


def _pipelined(model: Model, plan: Plan, pricer: Pricer) -> Projection:
    grid = build_stages(model, plan, pricer)
    timed = timed_chunks(model, grid, plan, pricer)
    chunks = [[timed[chunk_key(stage)].chunk for stage in row] for row in grid]
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
        middle = timed[chunk_key(stage)].middle
        work = merged(work, scaled(middle.compute_s, m))
        stalls = merged(stalls, scaled(middle.stalled_s, m))
        slowed += m * middle.slowed_s
    bubble = total - sum(work.values()) - sum(stalls.values()) - slowed
    exposed = max(
        exposed_edges_s(row, chunks, plan, pricer)
        for row in {tuple(chunk_key(stage) for stage in row): row for row in grid}.values()
    )
    stalls["dp_comm"] = stalls.get("dp_comm", 0.0) + exposed
    dense, expert = max((_params(row) for row in grid), key=sum)
    host_s = sum(timed[chunk_key(stage)].launch_s for stage in row) * m
    parts = StepParts(work, stalls, slowed, bubble, host_s, dense, expert)
    return _assemble(model, plan, pricer, parts, row[0])


def transfer_s(model: Model, plan: Plan, pricer: Pricer) -> float:
    """Seconds from one pipeline stage to the next."""
    size = float(plan.tokens) * model.hidden * BF16 / (plan.tp if plan.sequence_parallel else 1)
    return pricer.price(CollectiveOp("stage_to_stage", "forward", "send_recv", "pp", size)).seconds


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
    copied_bytes = offloaded_bytes(model, plan, block_range)
    return build(model, plan, pricer, block_range, first, last, copied_bytes)


def micro_batches(
    model: Model, stage: Stage, plan: Plan, pricer: Pricer, count: int, skipped: int = 0
) -> tuple[Lanes, list[int]]:
    """Issues the passes of some micro-batches, the last with the exchange of gradients; the first `skipped`
    are over already.

    FSDP gathers and reduces in each; other shardings gather in the first and reduce in the last.
    """
    lanes, marks = Lanes(), list[int]()
    host = host_cost(model, plan, pricer)
    exchange = DataParallel(plan, pricer)
    sharded_weights = plan.sharding != "ddp" and plan.shard_ranks > 1
    for number in range(skipped, count):
        gathers = plan.is_fsdp or (number == 0 and sharded_weights and plan.dp_overlap)
        last = number == count - 1
        syncs_each = plan.is_fsdp and plan.grad_sync == "each"
        reduces = syncs_each or (last and (plan.is_fsdp or plan.dp_overlap))
        if number == 0 and sharded_weights and not plan.dp_overlap:
            exchange.all_at_once(lanes, stage, True)
        passes.forward(lanes, stage, exchange, plan, gathers, lanes.flush(), host)
        passes.backward(lanes, stage, exchange, plan, reduces, host)
        if number == count - 1 and not plan.dp_overlap:
            exchange.all_at_once(lanes, stage, False)
        marks.append(len(lanes.tasks))
    return lanes, marks


def _between(tasks: list[StreamTask], simulated: StreamRun, first: int, last: int) -> StreamRun:
    """The run that the micro-batch of tasks[first:last] adds to the compute stream."""
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


def _assemble(model: Model, plan: Plan, pricer: Pricer, parts: StepParts, stage: Stage) -> Projection:
    breakdown, stalls = dict(parts.work), dict(parts.stalls)
    breakdown["host"] = stalls.pop(HOST, 0.0)
    for category, seconds in stalls.items():
        name = f"exposed_{category}"
        breakdown[name] = breakdown.get(name, 0.0) + seconds
    breakdown["contention"] = parts.slowed
    if plan.pp > 1:
        breakdown["pipeline_bubble"] = parts.bubble
    breakdown["optimizer"] = optimizer_s(parts.dense_params, parts.expert_params, plan, pricer)
    device_s = sum(breakdown.values()) - breakdown["host"]
    if "host" not in pricer.disabled_terms:
        breakdown["host"] = max(breakdown["host"], parts.host_s - device_s)
    breakdown["stragglers"] = straggler_share(plan.world_size, pricer) * sum(breakdown.values())
    device_s += breakdown["stragglers"]
    anchor, host_s = pricer.anchor, parts.host_s
    if anchor is not None:
        breakdown = scaled(breakdown, anchor.rest)
        device_s, host_s = device_s * anchor.rest, host_s * anchor.rest
    step_s = sum(breakdown.values())
    reasons = (
        widenings(model, plan, pricer.hardware, breakdown)
        if anchor is None
        else anchored_widenings(model, plan, pricer.hardware, anchor)
    )
    low_s, high_s = bounds(step_s, reasons)
    return Projection(
        model,
        plan,
        pricer.hardware,
        step_s,
        low_s,
        high_s,
        breakdown,
        device_s,
        host_s,
        stage,
        tuple(reasons),
        anchor,
    )


def straggler_share(num_gpus: int, pricer: Pricer) -> float:
    """Share that waiting for the slowest of many GPUs adds to that within a node, which measured steps have
    already.

    The largest of N independent normal deviations lies about sqrt(2 ln N) standard deviations above the mean.
    """
    if num_gpus <= NODE or "stragglers" in pricer.disabled_terms:
        return 0.0
    return pricer.factors.straggler * (math.sqrt(2 * math.log(num_gpus)) - math.sqrt(2 * math.log(NODE)))


def _params(row: list[Stage]) -> tuple[float, float]:
    units: list[Unit] = [unit for stage in row for unit in stage.units]
    return sum(unit.dense_params for unit in units), sum(unit.expert_params for unit in units)


def optimizer_s(stage_params: float, expert_params: float, plan: Plan, pricer: Pricer) -> float:
    """Adam on what this rank owns: reads weight, gradient and two moments, writes weight and moments.

    mixed also writes bf16 weights, reads the gradients for their norm and zeroes them.
    """
    if plan.task == "lora" or "optimizer" in pricer.disabled_terms:
        return 0.0
    dense, expert = (1, 1) if plan.sharding == "ddp" else (plan.shard_ranks, plan.expert_shard_ranks)
    widths = {"mixed": 7 * FP32 + BF16 + FP32, "fp32": 7 * FP32, "bf16": 7 * BF16}

    def touched(params: float, ranks: int) -> float:
        # FSDP leaves what only one rank holds as it is, in bf16.
        kind = "bf16" if plan.is_fsdp and ranks == 1 and plan.weight_kind == "fp32" else plan.weight_kind
        return params / ranks * widths[kind]

    zeroed = FP32 * (stage_params + expert_params) if plan.weight_kind == "mixed" else 0.0
    rate = pricer.hardware.memory.sustained_hbm_bytes_per_s
    updated = touched(stage_params, dense) + touched(expert_params, expert)
    return (updated / pricer.factors.optimizer + zeroed) / rate
