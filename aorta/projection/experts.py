"""Layer of experts: router, exchange of tokens over ep, the GEMMs of the local experts, and back."""

from aorta.projection.layer_parts import (
    Linear,
    PassOps,
    activation,
    backward_gemms,
    cast_op,
    forward_gemm,
    gather_op,
    linear_backward,
    linear_forward,
    mlp,
    outside_tokens,
    stream_bytes,
)
from aorta.projection.model import Model
from aorta.projection.ops import BF16, FP32, CollectiveOp, Elementwise, GemmOp, Op
from aorta.projection.plan import Plan


def expert_layer(model: Model, plan: Plan, domain: int) -> PassOps:
    """Router, permutation, exchange over ep, grouped GEMMs, and back. Routing is taken as balanced."""
    experts = model.experts
    assert experts is not None
    split = plan.expert_tp > 1
    tokens = plan.tokens if split or not plan.sequence_parallel else outside_tokens(plan)
    rows = tokens * experts.num_active
    local = experts.num_experts // plan.ep
    per_expert = max(1, round(rows * plan.ep / experts.num_experts))
    width = model.hidden * BF16
    forward: list[Op] = []
    backward: list[Op] = []
    if split:
        forward.append(gather_op("moe_gather", "forward", model, plan))
        backward.append(gather_op("moe_grad_gather", "dgrad", model, plan))

    router = Linear("router", tokens, experts.num_experts, model.hidden)
    scores = float(tokens) * experts.num_experts * FP32
    forward += [
        forward_gemm(router, plan, fp8=False),
        Elementwise("router_scores", "forward", 3 * scores, 2 * scores, "rows", launches=6),
        # A token's row is read once: its experts' copies come from the cache.
        Elementwise("permute", "forward", tokens * width, rows * width, "rows", launches=4),
    ]
    if experts.latent:
        width = experts.latent * BF16
        narrow = Linear("experts_narrow", tokens, experts.latent, model.hidden)
        widen = Linear("experts_widen", tokens, model.hidden, experts.latent)
        forward += linear_forward(narrow, plan)
    exchange = CollectiveOp(
        "dispatch", "forward", "all_to_all", "ep", float(rows) * width * _sent_share(model, plan, domain)
    )
    if plan.ep > 1:
        forward.append(exchange)
    grouped = _grouped(model, plan, local, per_expert, experts.ffn // plan.expert_tp)
    forward += grouped.forward
    if plan.ep > 1:
        forward.append(exchange._replace(name="combine"))
    forward.append(Elementwise("unpermute", "forward", rows * width, tokens * width, launches=3))
    if experts.latent:
        forward += linear_forward(widen, plan)
        backward += linear_backward(widen, plan)
    # Also reads the experts' outputs, for the gradients of their weights.
    read = (rows + tokens) * width
    backward.append(Elementwise("unpermute_grad", "dgrad", read, rows * width, "rows", launches=4))
    if plan.ep > 1:
        backward.append(exchange._replace(name="combine_grad", phase="dgrad"))
    backward += grouped.backward
    if plan.ep > 1:
        backward.append(exchange._replace(name="dispatch_grad", phase="dgrad"))
    backward += [
        Elementwise("permute_grad", "dgrad", rows * width, tokens * width, launches=3),
        *(linear_backward(narrow, plan) if experts.latent else ()),
        Elementwise("router_grad", "dgrad", 3 * scores, scores, "rows", launches=6),
        *backward_gemms(router, plan, fp8=False),
    ]
    if split:
        forward.append(
            CollectiveOp("moe_scatter", "forward", "reduce_scatter", "tp", stream_bytes(model, plan))
        )
        backward.append(
            CollectiveOp("moe_grad_scatter", "dgrad", "reduce_scatter", "tp", stream_bytes(model, plan))
        )
    if experts.shared_width:
        shared = mlp("shared", model, plan, plan.tokens, experts.shared_width // plan.tp, plan.tp > 1)
        forward += shared.forward
        backward += shared.backward
    return PassOps(tuple(forward), tuple(backward))


def _sent_share(model: Model, plan: Plan, domain: int) -> float:
    """Copies of a token that are sent over its active experts: DeepEP sends one per place that has some.

    Places are scale-up domains where ep spans several (the copy is handed on inside), else ranks. The
    expected number of different places that balanced routing hits; group-limited routing caps it.
    """
    experts = model.experts
    assert experts is not None
    if not plan.deepep:
        return 1.0
    domains = -(-plan.ep * plan.expert_tp // domain)
    places = domains if domains > 1 else plan.ep
    hit = places * (1 - (1 - 1 / places) ** experts.num_active)
    if domains > 1 and experts.most_nodes is not None:
        hit = min(hit, experts.most_nodes)
    return hit / experts.num_active


def _grouped(model: Model, plan: Plan, num_local: int, per_expert: int, ffn: int) -> PassOps:
    """The GEMMs of the local experts: one batched call each, or one call per expert."""
    batched = plan.moe_grouped_gemm == "turbo"
    batch, calls = (num_local, 1) if batched else (1, num_local)
    joined = plan.stack == "megatron"
    input_gemms = [("experts_gate_up", 2 * ffn)] if joined else [("experts_gate", ffn), ("experts_up", ffn)]
    if not model.gated_ffn:
        input_gemms = [("experts_up", ffn)]
    width = model.experts.latent if model.experts and model.experts.latent else model.hidden
    elements = float(num_local) * per_expert
    forward: list[Op] = []
    backward: list[Op] = []

    def linear(name: str, columns: int, rows: int) -> None:
        if plan.low_precision:
            forward.append(cast_op(name, "forward", elements * rows, plan))
            backward.insert(0, cast_op(f"{name}_grad", "dgrad", elements * columns, plan))
        position = 1 if plan.low_precision else 0
        gemm = GemmOp(name, "forward", per_expert, columns, rows, "TN", plan.dtype, batch, calls)
        forward.append(gemm)
        grads: list[Op] = [gemm._replace(name=f"{name}_dgrad", phase="dgrad", n=rows, k=columns, layout="NN")]
        if plan.task == "pretrain":
            grads.append(
                gemm._replace(
                    name=f"{name}_wgrad", phase="wgrad", m=columns, n=rows, k=per_expert, layout="NT"
                )
            )
        backward[position:position] = grads

    for name, columns in input_gemms:
        linear(name, columns, width)
    act = activation("experts", elements * ffn, model, plan)
    forward += act.forward
    backward[0:0] = act.backward
    linear("experts_down", width, ffn)
    return PassOps(tuple(forward), tuple(backward))
