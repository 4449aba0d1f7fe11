"""Host time of a stage: what launching its operations costs under each stack."""

from typing import NamedTuple

from aorta.projection.job.model import Model
from aorta.projection.job.plan import Plan
from aorta.projection.pricing import Factors, Pricer
from aorta.projection.schedule.stage import Stage, Unit


class HostCost(NamedTuple):
    """Host seconds per launch in blocks and outside, and per unit that FSDP handles."""

    block_s: float
    other_s: float
    unit_s: float
    experts_s: float = 0.0
    """Host seconds of a whole layer of experts, forward and backward, beside its launches."""

    def of_block(self, unit: Unit) -> float:
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


def launch_s(model: Model, stage: Stage, plan: Plan, pricer: Pricer) -> float:
    """Host time to launch one micro-batch of a chunk."""
    host = host_cost(model, plan, pricer)
    total = len(stage.blocks) * host.unit_s
    for unit in stage.units:
        launches = sum(priced.op.launches for priced in (*unit.forward, *unit.backward))
        total += launches * (host.of_block(unit) if unit in stage.blocks else host.other_s)
    return total
