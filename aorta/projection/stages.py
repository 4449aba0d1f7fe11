"""Stages of a pipeline: the layers of one rank, their operations priced, and the host time to launch them."""

from collections.abc import Iterable
from typing import NamedTuple

from aorta.projection import layers
from aorta.projection.model import KINDS, Model
from aorta.projection.ops import Op
from aorta.projection.plan import Plan
from aorta.projection.prices import Factors, Priced, Pricer


class Unit(NamedTuple):
    """Layer, or embedding and output: gathered, computed and reduced together."""

    name: str
    forward: tuple[Priced, ...]
    backward: tuple[Priced, ...]
    """Recomputation first."""
    dense_params: float
    """Parameters on this rank, split by tp, before sharding over data parallelism."""
    expert_params: float = 0.0


class Stage(NamedTuple):
    """A chunk of a pipeline rank: its units, priced."""

    first: Unit | None
    """Embedding; with the output layer where one rank has both."""
    blocks: tuple[Unit, ...]
    last: Unit | None
    units: tuple[Unit, ...]
    """All of these in their order."""
    offloaded_bytes: float = 0.0
    """Activations of one micro-batch that go to the host and come back."""


def build(
    model: Model,
    plan: Plan,
    pricer: Pricer,
    block_range: range,
    first: bool,
    last: bool,
    copied_bytes: float = 0.0,
) -> Stage:
    """The units of layers block_range, with embedding and output where asked.

    copied_bytes: activations of one micro-batch that go to the host.
    """

    def priced(ops: Iterable[Op]) -> tuple[Priced, ...]:
        return tuple(pricer.price(op) for op in ops)

    kinds = pricer.units  # equal layers of all stages are worked out once
    blocks = []
    for layer in block_range:
        key = model.layer_kinds[layer], recomputes(model, plan, layer)
        if key not in kinds:
            dense, expert = local_params(model, plan, key[0])
            work = layers.autocast(
                layers.block(model, plan, key[0], pricer.domain_size), dense + expert, plan
            )
            again = layers.recomputed(work, plan, key[1])
            kinds[key] = Unit(
                unit_name(key[0]), priced(work.forward), priced((*again, *work.backward)), dense, expert
            )
        blocks.append(kinds[key])
    vocab = model.embedding_params / (plan.tp if plan.vocab_parallel else 1)
    top = bottom = None
    if first:
        work = layers.embedding(model, plan)
        top = Unit("embedding", priced(work.forward), priced(work.backward), vocab)
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
        bottom = Unit("output", priced(work.forward), priced(work.backward), output_params + model.hidden)
    units = tuple(unit for unit in (top, *blocks, bottom) if unit is not None)
    return Stage(top, tuple(blocks), bottom, units, copied_bytes)


def unit_name(kind: str) -> str:
    """Name of a layer's kind: by its feed-forward where it has one."""
    return KINDS[kind][1] if KINDS[kind][1] != "none" else kind


def recomputes(model: Model, plan: Plan, layer: int) -> bool:
    """True if a layer is recomputed whole. Where a part of the layers is, it is spread evenly."""
    if plan.recompute != "full":
        return False
    count = model.num_layers if plan.recompute_layers is None else plan.recompute_layers
    return (layer + 1) * count // model.num_layers > layer * count // model.num_layers


def mtp_params(model: Model, plan: Plan) -> tuple[float, float]:
    """Dense and expert parameters of a layer that predicts a token further on, as in local_params."""
    dense, expert = local_params(model, plan, model.mtp_kind)
    return dense + 2 * model.hidden**2 + 2 * model.hidden, expert


def local_params(model: Model, plan: Plan, kind: str) -> tuple[float, float]:
    """Dense and expert parameters of one layer on one rank, before sharding over data parallelism."""
    total = model.layer_params(kind)
    if KINDS[kind][1] != "moe" or model.experts is None:
        return total / plan.tp, 0.0
    experts = model.experts.num_experts * model.expert_params
    return (total - experts) / plan.tp, experts / plan.ep / plan.expert_tp


class HostCost(NamedTuple):
    """Host seconds per launch in blocks and outside, and per unit that FSDP handles."""

    block_s: float
    other_s: float
    unit_s: float
    experts_s: float = 0.0
    """Host seconds of a whole layer of experts, forward and backward, beside its launches."""

    def block_launch_s(self, unit: Unit) -> float:
        """Host seconds per launch of a layer."""
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


def launch_s(model: Model, stage: Stage, plan: Plan, pricer: Pricer) -> float:
    """Host time to launch one micro-batch of a chunk."""
    host = host_cost(model, plan, pricer)
    total = len(stage.blocks) * host.unit_s
    for unit in stage.units:
        launches = sum(priced.op.launches for priced in (*unit.forward, *unit.backward))
        total += launches * (host.block_launch_s(unit) if unit in stage.blocks else host.other_s)
    return total
