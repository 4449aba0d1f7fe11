"""The two passes of a stage as tasks on streams: gathers of weights, compute, reductions of gradients."""

import itertools
from collections import deque
from typing import Literal

from aorta.projection.ops import BF16, CollectiveOp, Elementwise
from aorta.projection.pipeline import Chunk
from aorta.projection.plan import Plan
from aorta.projection.prices import Pricer
from aorta.projection.stages import FREE, HostCost, Stage, Unit
from aorta.projection.streams import Lanes


class DataParallel:
    """Gathers of weights and reductions of gradients of units, and the copies around them."""

    def __init__(self, plan: Plan, pricer: Pricer) -> None:
        self.plan, self.pricer = plan, pricer

    def all_at_once(self, lanes: Lanes, stage: Stage, gathers: bool) -> None:
        """Weights before or gradients after everything else, with nothing beside them."""
        for unit in stage.units:
            last = self.gather(lanes, unit, lanes.flush()) if gathers else self.reduce(lanes, unit, None)
            if last is not None:
                lanes.need(last)
        lanes.flush()

    def gather(self, lanes: Lanes, unit: Unit, dependencies: tuple[int, ...]) -> int | None:
        """bf16 weights of a unit; None where nothing is sharded."""
        return self._exchange(lanes, unit, "all_gather", BF16, dependencies)

    def copy_out(self, lanes: Lanes, unit: Unit) -> None:
        """FSDP2 copies the gathered buffer into the parameters."""
        if self.plan.sharding == "fsdp2":
            size = (unit.dense_params + unit.expert_params) * BF16
            self._copy(lanes, "gathered_to_weights", size, size, "stream")

    def reduce(self, lanes: Lanes, unit: Unit, previous_reduction: int | None) -> int | None:
        """Gradients of a unit, after the previous reduction; None where nothing is exchanged."""
        plan = self.plan
        width = plan.grad_exchange_bytes
        params = unit.dense_params + unit.expert_params
        if plan.task == "lora" or params == 0:
            return None
        if plan.sharding == "fsdp2":
            if previous_reduction is not None:
                lanes.flush()  # the copy waits, not the compute before it
                lanes.need(previous_reduction)  # the buffer of the reduction before is freed first
            self._copy(lanes, "grads_to_buffer", params * BF16, params * width, "copy")
        op: Literal["all_reduce", "reduce_scatter"] = (
            "all_reduce" if plan.sharding == "ddp" else "reduce_scatter"
        )
        return self._exchange(lanes, unit, op, width, lanes.flush())

    def _copy(
        self, lanes: Lanes, name: str, read: float, written: float, access: Literal["stream", "copy"]
    ) -> None:
        if "fsdp_copy" in self.pricer.disabled_terms:
            return
        priced = self.pricer.price(Elementwise(name, "optimizer", read, written, access))
        lanes.compute(name, "fsdp_copy", priced.seconds)

    def _exchange(
        self,
        lanes: Lanes,
        unit: Unit,
        op: Literal["all_gather", "reduce_scatter", "all_reduce"],
        width: int,
        dependencies: tuple[int, ...],
    ) -> int | None:
        last = None
        sides: tuple[tuple[Literal["dp", "edp"], float, int], ...] = (
            ("dp", unit.dense_params, self.plan.shard_ranks),
            ("edp", unit.expert_params, self.plan.expert_shard_ranks),
        )
        for axis, params, ranks in sides:
            if params == 0 or (ranks == 1 and self.plan.replicas == 1):
                continue
            priced = self.pricer.price(
                CollectiveOp(f"{unit.name}_{op}", "optimizer", op, axis, params * width)
            )
            if priced.seconds > 0:
                last = lanes.communicate(priced, dependencies)
                dependencies = ()
            if op != "all_gather" and self.plan.replicas > 1:
                last = self._sum_copies(lanes, unit, params * width / ranks, dependencies) or last
                dependencies = ()
        return last

    def _sum_copies(
        self, lanes: Lanes, unit: Unit, shard_bytes: float, dependencies: tuple[int, ...]
    ) -> int | None:
        """Sums the sharded gradients over the copies of the model."""
        priced = self.pricer.price(
            CollectiveOp(f"{unit.name}_all_reduce", "optimizer", "all_reduce", "copies", shard_bytes)
        )
        if priced.seconds <= 0:
            return None
        return lanes.communicate(priced, dependencies)


def forward(
    lanes: Lanes,
    stage: Stage,
    exchange: DataParallel,
    plan: Plan,
    gathers: bool,
    start: tuple[int, ...] = (),
    host: HostCost = FREE,
) -> None:
    """Issues the forward pass of a chunk. gathers: weights come from the other ranks first.

    FSDP gathers two units ahead of the one that computes, as the host runs ahead of the device and the buffer
    of a gather is free again when its unit has been copied out; more with an explicit prefetch. An optimizer
    that left the weights sharded (zero1, zero2) has them gathered in order as fast as the network goes.
    """
    units = stage.units
    # FSDP's root group (embedding, final norm, output) comes first and stays gathered for the whole pass.
    root = _root(stage) if plan.is_fsdp else None
    order = [root, *stage.blocks] if root is not None else list(units)
    gathered: list[int | None] = []
    begun: list[tuple[int, ...]] = []
    ahead = max(2, 1 + plan.forward_prefetch) if plan.is_fsdp else len(order)

    def issue(number: int) -> None:
        # The buffer of the unit `ahead` places before is free once that unit has begun.
        dependencies = start if number < ahead else begun[number - ahead]
        gathered.append(exchange.gather(lanes, order[number], dependencies))

    def enter(number: int) -> None:
        lanes.flush()
        lanes.issue(host.unit_s / 3)
        task = gathered[number] if gathers else None
        if task is not None:
            lanes.need(task)
            exchange.copy_out(lanes, order[number])
        begun.append(lanes.flush() if task is not None else ())
        if gathers and number + ahead < len(order):
            issue(number + ahead)

    if gathers:
        for number in range(min(ahead, len(order))):
            issue(number)
    position = 0
    if root is not None:
        enter(0)
        position = 1
    for unit in units:
        if root is None or unit in stage.blocks:
            enter(position)
            position += 1
        lanes.add(unit.forward, plan, host.block_launch_s(unit) if unit in stage.blocks else host.other_s)
    lanes.flush()


def backward(
    lanes: Lanes, stage: Stage, exchange: DataParallel, plan: Plan, reduces: bool, host: HostCost = FREE
) -> int | None:
    """Backward pass of a chunk; the last reduction, if gradients are exchanged.

    FSDP gathers each unit again, one ahead or as many as plan.backward_prefetch; embedding and output stay
    gathered. Gathers and reductions share
    one communicator and take turns.
    """
    last: int | None = None
    root = _root(stage) if plan.is_fsdp else None
    blocks = list(reversed(stage.blocks))
    waiting: deque[int | None] = deque()
    if stage.last is not None:
        lanes.add(stage.last.backward, plan, host.other_s)
        if reduces and root is None:
            last = exchange.reduce(lanes, stage.last, last)
    ahead = iter(blocks if plan.is_fsdp and plan.reshard_after_forward else ())
    start = lanes.flush() if plan.is_fsdp else ()
    for block in itertools.islice(ahead, plan.backward_prefetch):
        waiting.append(exchange.gather(lanes, block, start))
    for unit in blocks:
        task = waiting.popleft() if waiting else None
        if task is not None:
            lanes.flush()
            lanes.need(task)
            exchange.copy_out(lanes, unit)
            begun = lanes.flush()
            waiting.extend(exchange.gather(lanes, block, begun) for block in itertools.islice(ahead, 1))
        lanes.issue(host.unit_s * 2 / 3)
        lanes.add(unit.backward, plan, host.block_launch_s(unit))
        if reduces:
            last = exchange.reduce(lanes, unit, last) or last
    if stage.first is not None:
        lanes.add(stage.first.backward, plan, host.other_s)
        if reduces and root is None:
            last = exchange.reduce(lanes, stage.first, last) or last
    if reduces and root is not None:
        last = exchange.reduce(lanes, root, last) or last
    lanes.flush()
    return last


def _root(stage: Stage) -> Unit | None:
    """FSDP keeps embedding, final norm and output in one group that stays gathered."""
    ends = [unit for unit in (stage.first, stage.last) if unit is not None]
    if not ends:
        return None
    return Unit("root", (), (), sum(unit.dense_params for unit in ends))


def exposed_edges_s(row: list[Stage], chunks: list[list[Chunk]], plan: Plan, pricer: Pricer) -> float:
    """Seconds of weight gathers before the first micro-batch and of gradient reductions after the last
    that nothing hides.

    Under them run the first forward and the last backward of each chunk, spread over the pipeline's fill and
    drain: a round of pp micro-batches of the other chunks, or one micro-batch of this one.
    """
    if plan.is_fsdp or plan.world_size == plan.pp * plan.tp:
        return 0.0
    exchange = DataParallel(plan, pricer)
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
            tasks = [task for task in lanes.tasks if task.stream != "compute"]
            seconds.append([(task.seconds, max(1.0, slow * task.link_share)) for task in tasks])
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
