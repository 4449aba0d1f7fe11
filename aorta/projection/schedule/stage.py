"""The layers of one pipeline rank laid on streams: gathers, compute, exchanges, reductions."""

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from aorta.projection.job.model import KINDS, Model
from aorta.projection.job.plan import Plan
from aorta.projection.pricing import Factors, Priced, Pricer
from aorta.projection.work import layers
from aorta.projection.work.lanes import COMPUTE, StreamTask
from aorta.projection.work.layers import BF16, FP32
from aorta.projection.work.ops import AttentionOp, CollectiveOp, Elementwise, GemmOp, Op

STREAMS = {
    "tp": "tp",
    "ep": "all_to_all",
    "cp": "context",
    "dp": "data_parallel",
    "edp": "data_parallel",
    "copies": "data_parallel",
}
KERNEL_OPS = (GemmOp, AttentionOp)


class Unit(NamedTuple):
    """What is gathered, computed and reduced together: a layer, or embedding and output."""

    name: str
    forward: tuple[Priced, ...]
    backward: tuple[Priced, ...]
    """Recomputation first."""
    dense_params: float
    """On this rank, split by tp, before sharding over data parallelism."""
    expert_params: float = 0.0


class HostCost(NamedTuple):
    """Host seconds per launch in blocks and outside, and per unit that FSDP handles."""

    block_s: float
    other_s: float
    unit_s: float
    experts_s: float = 0.0
    """Of a whole layer of experts, forward and backward, beside its launches."""

    def of_block(self, unit: "Unit") -> float:
        """Per launch of a layer."""
        if not self.experts_s or not unit.expert_params:
            return self.block_s
        launches = sum(priced.op.launches for priced in (*unit.forward, *unit.backward))
        return self.block_s + self.experts_s / launches


FREE = HostCost(0.0, 0.0, 0.0)


def host_cost(model: Model, plan: Plan, pricer: Pricer) -> HostCost:
    factors = pricer.factors
    if "host" in pricer.disabled_terms:
        return FREE
    outside_block = factors.megatron_launch_s if plan.stack == "megatron" else factors.eager_launch_s
    split = plan.tp > 1 and plan.stack != "megatron"
    block = {
        "eager": factors.dtensor_launch_s if split else factors.eager_launch_s,
        "compiled": factors.compiled_launch_s,
        "megatron": factors.megatron_launch_s,
    }[plan.stack]
    unit = 0.0
    if plan.is_fsdp:
        unit = factors.fsdp_dtensor_unit_s if split else factors.fsdp_unit_s
    if plan.cuda_graphs:
        block *= factors.graph_host
    return HostCost(block, outside_block, unit, expert_host_s(model, plan, factors))


def expert_host_s(model: Model, plan: Plan, factors: Factors) -> float:
    """Host time of one layer of experts, forward and backward, that a stack needs beside its launches."""
    if model.experts is None or plan.stack != "megatron":
        return 0.0
    local = model.experts.num_experts / plan.ep
    recorded = factors.graph_host if plan.cuda_graphs else 1.0
    return (recorded * factors.moe_layer_host_s + local * factors.expert_host_s) * plan.host_factor


class Stage(NamedTuple):
    """One chunk of a pipeline rank."""

    first: Unit | None
    """Embedding; with the output layer where one rank has both."""
    blocks: tuple[Unit, ...]
    last: Unit | None
    offloaded_bytes: float = 0.0
    """Activations of one micro-batch that go to the host and come back."""

    @property
    def units(self) -> tuple[Unit, ...]:
        return tuple(unit for unit in (self.first, *self.blocks, self.last) if unit is not None)


def build(model: Model, plan: Plan, pricer: Pricer, block_range: range, first: bool, last: bool) -> Stage:
    """The units of layers block_range, with embedding and output where asked."""

    def priced(ops: Iterable[Op]) -> tuple[Priced, ...]:
        return tuple(pricer.price(op) for op in ops)

    kinds = pricer.units  # equal layers of all stages are worked out once
    blocks = []
    for layer in block_range:
        key = model.layer_kind(layer), recomputes(model, plan, layer)
        if key not in kinds:
            dense, expert = local_params(model, plan, key[0])
            work = layers.autocast(
                layers.block(model, plan, key[0], pricer.domain_size), dense + expert, plan
            )
            again = layers.recomputed(work, plan, key[1])
            kinds[key] = _scaled(
                Unit(
                    unit_name(key[0]), priced(work.forward), priced((*again, *work.backward)), dense, expert
                ),
                pricer,
            )
        blocks.append(kinds[key])
    vocab = model.embedding_params / (plan.tp if plan.vocab_parallel else 1)
    top = bottom = None
    if first:
        work = layers.embedding(model, plan)
        top = _scaled(Unit("embedding", priced(work.forward), priced(work.backward), vocab), pricer)
    if last and plan.mtp:
        work = layers.further_prediction(model, plan, pricer.domain_size)
        dense, expert = mtp_params(model, plan)
        blocks += [Unit("mtp", priced(work.forward), priced(work.backward), dense, expert)] * (
            model.num_mtp_layers
        )
    if last:
        work = layers.output(model, plan)
        output_params = 0.0 if model.tied_embeddings and first else vocab
        work = layers.autocast(work, output_params, plan)
        bottom = _scaled(
            Unit("output", priced(work.forward), priced(work.backward), output_params + model.hidden), pricer
        )
    return Stage(top, tuple(blocks), bottom)


def unit_name(kind: str) -> str:
    """What measurements call a layer of that kind: by its feed-forward where it has one."""
    return KINDS[kind][1] if KINDS[kind][1] != "none" else kind


def _scaled(unit: Unit, pricer: Pricer) -> Unit:
    """The unit as long as a measurement says, where there is one."""
    if unit.name not in pricer.scales:
        return unit
    forward_factor, backward_factor = pricer.scales[unit.name]
    return unit._replace(
        forward=tuple(priced._replace(seconds=priced.seconds * forward_factor) for priced in unit.forward),
        backward=tuple(priced._replace(seconds=priced.seconds * backward_factor) for priced in unit.backward),
    )


def recomputes(model: Model, plan: Plan, layer: int) -> bool:
    """Whether a layer is recomputed whole. Part of the layers: spread evenly."""
    if plan.recompute != "full":
        return False
    count = model.num_layers if plan.recompute_layers is None else plan.recompute_layers
    return (layer + 1) * count // model.num_layers > layer * count // model.num_layers


def mtp_params(model: Model, plan: Plan) -> tuple[float, float]:
    """The same of one layer that predicts a token further on; embedding and output are the model's."""
    dense, expert = local_params(model, plan, layers.mtp_kind(model))
    return dense + 2 * model.hidden**2 + 2 * model.hidden, expert


def local_params(model: Model, plan: Plan, kind: str) -> tuple[float, float]:
    """Dense and expert parameters of one layer on one rank, before sharding over data parallelism."""
    total = model.layer_params(kind)
    if KINDS[kind][1] != "moe" or model.experts is None:
        return total / plan.tp, 0.0
    experts = model.experts.num_experts * model.expert_params
    return (total - experts) / plan.tp, experts / plan.ep / plan.expert_tp


MOST_PARTS = 6
"""Operations of one compute task: the host is seen to issue them in groups of at most that many."""


BEFORE = -1
"""In a Block: the last compute task before it."""


class Block(NamedTuple):
    """The tasks of one pass through a unit, their numbers counted from the block's first."""

    tasks: tuple[StreamTask, ...]
    last: int
    """The last compute task, or BEFORE."""
    parts: tuple[tuple[str, str, float], ...]
    """What is not yet a task at its end, and what that waits for."""
    needs: tuple[int, ...]
    issue_s: float


class Lanes:
    """Collects tasks in the order in which the host issues them."""

    def __init__(self) -> None:
        self.tasks: list[StreamTask] = []
        self._blocks: dict[tuple[int, float], tuple[Sequence[Priced], Block]] = {}
        self._parts: list[tuple[str, str, float]] = []
        self._needs: set[int] = set()
        self._last: int | None = None
        self._issue_s = 0.0

    def issue(self, seconds: float) -> None:
        """Host time that passes before the next task can start."""
        self._issue_s += seconds

    def compute(self, name: str, category: str, seconds: float) -> None:
        if seconds > 0:
            self._parts.append((name, category, seconds))

    def flush(self, name: str = "") -> tuple[int, ...]:
        """Close the compute task that is being collected; the last compute task, if there is one."""
        if self._parts or self._needs:
            seconds = sum(part[2] for part in self._parts)
            label = name or (self._parts[0][0] if self._parts else "wait")
            task = StreamTask(
                COMPUTE, label, "compute", seconds, tuple(sorted(self._needs)), tuple(self._parts)
            )
            # A task is what the host issues in one go: its first kernel starts when that one is issued.
            self._append(task)
            self._last = len(self.tasks) - 1
            self._parts, self._needs = [], set()
        return () if self._last is None else (self._last,)

    def communicate(
        self,
        stream: str,
        name: str,
        category: str,
        op: str,
        seconds: float,
        dependencies: tuple[int, ...],
        size_bytes: float,
        link_share: float = 1.0,
    ) -> int:
        self._append(
            StreamTask(
                stream,
                name,
                category,
                seconds,
                dependencies,
                (),
                op,
                size_bytes=size_bytes,
                link_share=link_share,
            )
        )
        return len(self.tasks) - 1

    def _append(self, task: StreamTask) -> None:
        self.tasks.append(task._replace(issue_s=self._issue_s) if self._issue_s else task)
        self._issue_s = 0.0

    def need(self, task: int) -> None:
        """The compute that follows waits for a task."""
        self._needs.add(task)

    def add(self, ops: Sequence[Priced], plan: Plan, launch_s: float = 0.0) -> None:
        """Operations in order, collectives where they ask to be. launch_s: host time of each launch.

        Equal units, with nothing left open before them, are worked out once.
        """
        if self._parts or self._needs:
            self._add(ops, plan, launch_s)
            return
        key = id(ops), launch_s  # the operations are kept beside, so that no others get their id
        if key not in self._blocks:
            lanes = Lanes()
            lanes._last = BEFORE
            lanes._add(ops, plan, launch_s)
            last = BEFORE if lanes._last is None else lanes._last
            block = Block(tuple(lanes.tasks), last, tuple(lanes._parts), tuple(lanes._needs), lanes._issue_s)
            self._blocks[key] = ops, block
        self._place(self._blocks[key][1])

    def _place(self, block: Block) -> None:
        """The block's tasks behind those that are there."""
        base = len(self.tasks)
        before = () if self._last is None else (self._last,)
        for task in block.tasks:
            dependencies: tuple[int, ...] = ()
            for number in task.dependencies:
                dependencies += (base + number,) if number >= 0 else before
            self.tasks.append(StreamTask._make((*task[:4], dependencies, *task[5:])))
        if block.tasks:
            first = self.tasks[base]
            self.tasks[base] = first._replace(issue_s=first.issue_s + self._issue_s)
            self._issue_s = block.issue_s
        else:
            self._issue_s += block.issue_s
        if block.last >= 0:
            self._last = base + block.last
        self._parts = list(block.parts)
        self._needs = {base + number for number in block.needs}

    def _add(self, ops: Sequence[Priced], plan: Plan, launch_s: float) -> None:
        deferred: list[int] = []
        for priced in ops:
            op, seconds, category, _ = priced
            if len(self._parts) >= MOST_PARTS and launch_s > 0:
                self.flush()
            self.issue(launch_s * op.launches)
            if isinstance(op, CollectiveOp):
                if seconds > 0:
                    self._collective(op, priced, plan, deferred)
                continue
            if deferred and isinstance(op, KERNEL_OPS):
                self.flush()
                self.compute(op.name, category, seconds)
                self.flush()
                for task in deferred:
                    self.need(task)
                deferred = []
                continue
            self.compute(op.name, category, seconds)
        for task in deferred:
            self.need(task)

    def _collective(self, op: CollectiveOp, priced: Priced, plan: Plan, deferred: list[int]) -> None:
        def send(share: float, dependencies: tuple[int, ...]) -> int:
            return self.communicate(
                STREAMS[op.axis],
                op.name,
                priced.category,
                op.op,
                priced.seconds * share,
                dependencies,
                op.size_bytes * share,
                priced.link_share,
            )

        chunk = 1 / plan.tp
        if op.overlap == "next":
            deferred.append(send(1, self.flush()))
        elif op.overlap == "chunks_next":
            dependencies = self.flush()
            self.need(send(chunk, dependencies))
            deferred.append(send(1 - chunk, dependencies))
        elif op.overlap == "chunks_previous" and self._parts:
            name, kind, gemm_s = self._parts.pop()
            self.compute(name, kind, gemm_s * chunk)
            send(1 - chunk, self.flush())
            self.compute(name, kind, gemm_s * (1 - chunk))
            self.need(send(chunk, self.flush()))
        else:
            self.need(send(1, self.flush()))


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
        """Gradients of a unit, after those of `before`."""
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
                name = f"{unit.name}_{op}"
                size = params * width
                last = lanes.communicate(
                    STREAMS[axis], name, "dp_comm", op, priced.seconds, dependencies, size, priced.link_share
                )
                dependencies = ()
            if op != "all_gather" and self.plan.replicas > 1:
                last = self._sum_copies(lanes, unit, params * width / ranks, dependencies) or last
                dependencies = ()
        return last

    def _sum_copies(
        self, lanes: Lanes, unit: Unit, shard_bytes: float, dependencies: tuple[int, ...]
    ) -> int | None:
        """Of the sharded gradients over the copies of the model."""
        name = f"{unit.name}_all_reduce"
        priced = self.pricer.price(CollectiveOp(name, "optimizer", "all_reduce", "copies", shard_bytes))
        if priced.seconds <= 0:
            return None
        return lanes.communicate(
            STREAMS["copies"],
            name,
            "dp_comm",
            "all_reduce",
            priced.seconds,
            dependencies,
            shard_bytes,
            priced.link_share,
        )


def forward(
    lanes: Lanes,
    stage: Stage,
    exchange: DataParallel,
    plan: Plan,
    gathers: bool,
    start: tuple[int, ...] = (),
    host: HostCost = FREE,
) -> None:
    """Forward pass of a chunk. gathers: weights come from the other ranks first.

    FSDP gathers two units ahead of the one that computes, as the host runs ahead of the device and the buffer
    of a gather is free again when its unit has been copied out. An optimizer that left the weights sharded
    (zero1, zero2) has them gathered in order as fast as the network goes.
    """
    units = stage.units
    root = _root(stage) if plan.is_fsdp else None
    order = [root, *stage.blocks] if root is not None else list(units)
    gathered: list[int | None] = []
    begun: list[tuple[int, ...]] = []
    ahead = 2 if plan.is_fsdp else len(order)

    def issue(number: int) -> None:
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
        lanes.add(unit.forward, plan, host.of_block(unit) if unit in stage.blocks else host.other_s)
    lanes.flush()


def backward(
    lanes: Lanes, stage: Stage, exchange: DataParallel, plan: Plan, reduces: bool, host: HostCost = FREE
) -> int | None:
    """Backward pass of a chunk; the last reduction, if gradients are exchanged.

    FSDP gathers each unit again, one ahead; embedding and output stay gathered. Gathers and reductions share
    one communicator and take turns.
    """
    last: int | None = None
    root = _root(stage) if plan.is_fsdp else None
    blocks = list(reversed(stage.blocks))
    waiting: int | None = None
    if stage.last is not None:
        lanes.add(stage.last.backward, plan, host.other_s)
        if reduces and root is None:
            last = exchange.reduce(lanes, stage.last, last)
    if plan.is_fsdp and plan.reshard_after_forward and blocks:
        waiting = exchange.gather(lanes, blocks[0], lanes.flush())
    for number, unit in enumerate(blocks):
        if waiting is not None:
            lanes.flush()
            lanes.need(waiting)
            exchange.copy_out(lanes, unit)
            begun = lanes.flush()
            following = blocks[number + 1] if number + 1 < len(blocks) else None
            waiting = exchange.gather(lanes, following, begun) if following is not None else None
        lanes.issue(host.unit_s * 2 / 3)
        lanes.add(unit.backward, plan, host.of_block(unit))
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


def _root(stage: Stage) -> Unit | None:
    """FSDP keeps embedding, final norm and output in one group that stays gathered."""
    ends = [unit for unit in (stage.first, stage.last) if unit is not None]
    if not ends:
        return None
    return Unit("root", (), (), sum(unit.dense_params for unit in ends))
