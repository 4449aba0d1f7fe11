"""Forward and backward work of embedding, decoder block and output, at the sizes that one rank sees.

`block` is the place to begin. T tokens of a micro-batch on this rank; under sequence parallelism the parts
outside the GEMMs see T/tp.
"""

from collections.abc import Iterable
from typing import Literal

from aorta.projection.experts import expert_layer
from aorta.projection.layer_parts import (
    Linear,
    PassOps,
    backward_gemms,
    column_parallel,
    elementwise,
    forward_gemm,
    gather_grad,
    gather_op,
    linear_backward,
    linear_forward,
    mlp,
    norm_ops,
    outside_tokens,
    reduce_output,
    residual,
    residual_grad,
    stream_bytes,
)
from aorta.projection.model import KINDS, Model
from aorta.projection.ops import (
    BF16,
    FP32,
    AttentionOp,
    CollectiveOp,
    Elementwise,
    GemmOp,
    Op,
    OverlapMode,
    Scan,
)
from aorta.projection.plan import Plan

KEPT_FFN_OPS = ("ffn_norm", "ffn_residual", "ffn_down", "ffn_scatter", "ffn_sum")
EXPERT_OPS = ("router", "permute", "dispatch", "experts", "combine", "shared", "moe_gather")
KEPT_EXPERT_OPS = ("combine", "shared_down", "shared_scatter", "shared_sum")
"""Operations whose outputs the backward pass does not read."""
RECOMPUTED = {
    "norm": ("attention_norm", "ffn_norm", "latent_norm"),
    "activation": ("ffn_silu", "experts_silu", "shared_silu"),
    "latent_up": ("q_up", "k_up", "v_up"),
    "ffn": (),
    "experts": (),
    "every_second_gemm": (),
}
"""Operations of the modules of --recompute-modules."""


def block(model: Model, plan: Plan, kind: str, domain: int | None = None) -> PassOps:
    """Operations of a decoder layer of one of KINDS. backward holds no recomputation; see recomputed().

    domain: GPUs that scale-up links join, None: a node's.
    """
    mixer, feed_forward = KINDS[kind]
    parts: list[PassOps] = []
    if mixer == "state":
        parts.append(_state_space(model, plan))
    elif mixer != "none":
        parts.append(_attention(model, plan, model.window if mixer == "window" else None))
    if feed_forward != "none":
        parts.append(_feed_forward(model, plan, feed_forward, domain or plan.gpus_per_node))
    return PassOps(
        tuple(op for part in parts for op in part.forward),
        tuple(op for part in reversed(parts) for op in part.backward),
    )


def _attention(model: Model, plan: Plan, window: int | None) -> PassOps:
    qk_dim, v_dim = model.qk_dim, model.v_dim
    norm = norm_ops("attention_norm", model.hidden, plan)
    projections = _latent_projections(model, plan) if model.latent else _projections(model, plan)
    heads = model.num_heads // plan.tp
    kv_heads = max(1, model.num_kv_heads // plan.tp)
    out = Linear("attention_out", plan.tokens, model.hidden, heads * v_dim)
    rotated = plan.tokens * (heads + (1 if model.latent else kv_heads))
    rotated *= model.latent.qk_rope_dim if model.latent else qk_dim
    rope = _rope(rotated, plan) if model.positions == "rotary" else PassOps((), ())
    products = AttentionOp(
        "attention",
        "forward",
        batch=plan.micro_batch_size,
        seq_q=plan.seq_len // plan.cp,
        seq_kv=plan.seq_len // plan.cp,
        num_heads=heads,
        num_kv_heads=kv_heads,
        qk_dim=qk_dim,
        v_dim=v_dim,
        window=window,
        ring=plan.cp,
        launches=plan.cp,
    )
    if plan.cp > 1 and plan.cp_exchange == "all_to_all":
        products = products._replace(
            seq_q=plan.seq_len,
            seq_kv=plan.seq_len,
            num_heads=max(1, heads // plan.cp),
            num_kv_heads=max(1, kv_heads // plan.cp),
            ring=1,
            launches=1,
        )
    exchange = _context_exchange(model, plan, heads, kv_heads)
    merge = _ring_merge(model, plan, heads)
    sinks = _sinks(model, plan, heads)
    forward = (
        *rope.forward,
        *exchange.forward,
        products,
        *sinks.forward,
        *merge.forward,
        *after_exchange(exchange.forward, plan),
    )
    backward = (
        *exchange.backward,
        *sinks.backward,
        products._replace(
            name="attention_grad", phase="dgrad", backward=True, launches=3 * products.launches
        ),
        *merge.backward,
        *after_exchange(exchange.backward, plan),
        *rope.backward,
    )
    return _mixing(norm, projections, PassOps(forward, backward), out, model, plan)


def _mixing(
    norm: PassOps, projections: PassOps, inner: PassOps, out: Linear, model: Model, plan: Plan
) -> PassOps:
    """A layer that mixes tokens: inner between projections, in the frame that each has."""
    forward = (
        *norm.forward,
        *projections.forward,
        *inner.forward,
        *linear_forward(out, plan),
        *reduce_output("attention", model, plan),
        residual("attention_residual", "forward", model, plan),
    )
    backward = (
        *gather_grad("attention", model, plan),
        *linear_backward(out, plan),
        *inner.backward,
        *projections.backward,
        *norm.backward,
        *residual_grad("attention", model, plan),
    )
    return PassOps(forward, backward)


def _sinks(model: Model, plan: Plan, heads: int) -> PassOps:
    """One learned logit a head beside the keys. Fused kernels take it in; PyTorch scales the output after it.

    Passes over the output that compiled flex attention takes with sinks and not without: 0.19 ms forward and
    0.55 back for 134 MB on H100 (benchmarks/results/mixtures_and_hybrids_h100.csv).
    """
    if not model.sinks or plan.stack == "megatron":
        return PassOps((), ())
    size = float(plan.tokens) * heads * model.v_dim * BF16
    return elementwise("sinks", size, (2, 2), (6, 6), launches=(2, 4))


def _projections(model: Model, plan: Plan) -> PassOps:
    """Query, key and value, split by heads; one joined GEMM where the stack joins them."""
    heads, kv_heads = model.num_heads // plan.tp, max(1, model.num_kv_heads // plan.tp)
    query = heads * model.qk_dim * (2 if model.output_gate else 1)
    kv = kv_heads * model.qk_dim
    if plan.stack == "megatron":
        linears = [Linear("qkv", plan.tokens, query + 2 * kv, model.hidden)]
    else:
        linears = [
            Linear("query", plan.tokens, query, model.hidden, 3),
            Linear("key", plan.tokens, kv, model.hidden),
            Linear("value", plan.tokens, kv, model.hidden),
        ]
    return column_parallel("attention", linears, model, plan)


def _latent_projections(model: Model, plan: Plan) -> PassOps:
    """Multi-head latent attention. The narrow projections down are not split by tp."""
    assert model.latent is not None
    shapes = model.attention_matrices
    narrow = outside_tokens(plan)
    linears = [
        Linear(
            name,
            narrow if name.endswith("down") else plan.tokens,
            columns if name.endswith("down") else columns // plan.tp,
            rows,
        )
        for name, (rows, columns) in shapes.items()
        if name != "out"
    ]
    latents = model.latent.q_lora_rank + model.latent.kv_lora_rank
    first_up = "q_up" if model.latent.q_lora_rank else "k_up"
    size = float(narrow) * latents * BF16
    heads = model.num_heads // plan.tp
    joined = float(plan.tokens) * heads * model.qk_dim * 2 * BF16  # position and content parts side by side
    forward: list[Op] = []
    backward: list[Op] = []
    for linear in linears:
        if linear.name == first_up:
            forward.append(Elementwise("latent_norm", "forward", size, size, "rows", launches=2))
            backward.append(Elementwise("latent_norm_grad", "dgrad", 2 * size, size, "rows", launches=4))
            if plan.tp > 1 and plan.sequence_parallel:
                full = float(plan.tokens) * latents * BF16
                forward.append(CollectiveOp("latent_gather", "forward", "all_gather", "tp", full))
                backward.append(CollectiveOp("latent_scatter", "dgrad", "reduce_scatter", "tp", full))
        forward += linear_forward(linear, plan)
    for linear in reversed(linears):
        backward += linear_backward(linear, plan)
    forward.append(Elementwise("join_heads", "forward", joined, joined, "stream", launches=2))
    backward.insert(0, Elementwise("split_heads", "dgrad", joined, joined, "stream", launches=2))
    return PassOps(tuple(forward), tuple(backward))


def _rope(elements: float, plan: Plan) -> PassOps:
    """Rotation of queries and keys. elements: of both."""
    size = elements * BF16
    if plan.stack == "eager" or "rope" in plan.plain_kernels:
        # x cos + join(-second, first) sin: two products, a negation of half, a join and a sum.
        return elementwise("rope", size, (5.5, 4.5), (6.5, 5.5), "strided", launches=(10, 12))
    return elementwise("rope", size, (1, 1), (1, 1), launches=(2, 2))


def _context_exchange(model: Model, plan: Plan, heads: int, kv_heads: int) -> PassOps:
    """Keys and values of the other context-parallel ranks, beside the attention that uses them.

    all_to_all: queries, keys and values are exchanged for whole sequences of fewer heads before, and the
    result after (DeepSpeed Ulysses, arXiv 2309.14509), with nothing beside them.
    """
    if plan.cp == 1:
        return PassOps((), ())
    size = float(plan.micro_batch_size) * plan.seq_len * kv_heads * (model.qk_dim + model.v_dim) * BF16
    if plan.cp_exchange == "all_to_all":
        wide = float(plan.tokens) * ((heads + kv_heads) * model.qk_dim + kv_heads * model.v_dim) * BF16
        result = float(plan.tokens) * heads * model.v_dim * BF16
        return PassOps(
            (CollectiveOp("heads_exchange", "forward", "all_to_all", "cp", (wide + result) / 2),),
            (CollectiveOp("heads_exchange_grad", "dgrad", "all_to_all", "cp", (wide + result) / 2),),
        )
    overlap: OverlapMode = "" if plan.cp_exchange == "all_gather" else "next"
    return PassOps(
        (CollectiveOp("context_gather", "forward", "all_gather", "cp", size, overlap),),
        (
            CollectiveOp("context_regather", "dgrad", "all_gather", "cp", size, overlap),
            CollectiveOp("context_scatter", "dgrad", "reduce_scatter", "cp", size, overlap),
        ),
    )


def after_exchange(ops: Iterable[Op], plan: Plan) -> tuple[Op, ...]:
    """The exchange from split heads back to a split sequence; nothing unless it is an all-to-all."""
    if plan.cp == 1 or plan.cp_exchange != "all_to_all":
        return ()
    return tuple(op._replace(name=f"{op.name}_back") for op in ops if isinstance(op, CollectiveOp))[:1]


def _ring_merge(model: Model, plan: Plan, heads: int) -> PassOps:
    """Partial results of a ring, joined by their softmax sums; sums of partial gradients."""
    if plan.cp == 1 or plan.cp_exchange == "all_to_all":
        return PassOps((), ())
    local = float(plan.tokens) * heads
    # Each further step adds, on average to half of the queries, its result to the sum in fp32.
    partial = local * model.v_dim * (BF16 + 2 * FP32) * (plan.cp - 1) / 2
    kv_heads = heads if model.latent else max(1, model.num_kv_heads // plan.tp)
    per_step = float(plan.tokens) * (heads * model.qk_dim + kv_heads * (model.qk_dim + model.v_dim))
    grads = per_step * 3 * BF16 * (plan.cp - 1)
    return PassOps(
        (Elementwise("ring_merge", "forward", 0.6 * partial, 0.4 * partial, launches=plan.cp),),
        (Elementwise("ring_merge_grad", "dgrad", grads * 2 / 3, grads / 3, launches=2 * plan.cp),),
    )


def _state_space(model: Model, plan: Plan) -> PassOps:
    """A layer with a state space: projection in, short convolution, scan, gated norm, projection out.

    Sources: Dao and Gu, Transformers are SSMs (arXiv 2405.21060); Yang et al., Gated Delta Networks
    (arXiv 2412.06464).
    """
    state = model.state
    assert state is not None
    norm = norm_ops("attention_norm", model.hidden, plan)
    projections = column_parallel(
        "attention",
        [Linear("state_in", plan.tokens, state.projected // plan.tp, model.hidden)],
        model,
        plan,
    )
    out = Linear("state_out", plan.tokens, model.hidden, state.inner // plan.tp)
    tokens = float(plan.tokens) / plan.tp
    convolved = BF16 * tokens * (state.inner + 2 * state.num_key_heads * state.key_dim)
    inner = BF16 * tokens * state.inner
    # Operands, result, and the state at the end of every chunk in fp32, written and read.
    states = FP32 * tokens / state.chunk * state.num_heads * state.key_dim * state.value_dim
    scan = Scan("scan", "forward", tokens * state.flops_per_token(), convolved + inner + 3 * states)
    forward = (
        Elementwise("convolution", "forward", convolved, convolved, "rows"),
        scan,
        Elementwise("gated_norm", "forward", 2 * inner, inner, "rows"),
    )
    backward = (
        Elementwise("gated_norm_grad", "dgrad", 4 * inner, 2 * inner, "rows", launches=2),
        # The states are worked out again.
        scan._replace(
            name="scan_grad",
            phase="dgrad",
            flops=3 * scan.flops,
            size_bytes=2 * scan.size_bytes + 3 * states,
            launches=8,
        ),
        Elementwise("convolution_grad", "dgrad", 2 * convolved, convolved, "rows", launches=2),
    )
    return _mixing(norm, projections, PassOps(forward, backward), out, model, plan)


def _feed_forward(model: Model, plan: Plan, kind: Literal["dense", "moe"], domain: int) -> PassOps:
    norm = norm_ops("ffn_norm", model.hidden, plan)
    if kind == "dense" or model.experts is None:
        inner = mlp("ffn", model, plan, plan.tokens, model.ffn // plan.tp, split=plan.tp > 1)
    else:
        inner = expert_layer(model, plan, domain)
    forward = (*norm.forward, *inner.forward, residual("ffn_residual", "forward", model, plan))
    backward = (*inner.backward, *norm.backward, *residual_grad("ffn", model, plan))
    return PassOps(forward, backward)


def autocast(work: PassOps, params: float, plan: Plan) -> PassOps:
    """The operations with casts of fp32 weights to bf16 and of their gradients back, where they are fp32."""
    if plan.weight_kind != "fp32" or plan.is_fsdp:
        return work
    read, written = FP32 * params, BF16 * params
    weights = Elementwise("weights_to_bf16", "forward", read, written, "stream", launches=7)
    grads = Elementwise("grads_to_fp32", "wgrad", written, read, "stream", launches=7)
    return PassOps(
        (weights, *work.forward), (*work.backward, grads) if plan.task == "pretrain" else work.backward
    )


def recomputed(work: PassOps, plan: Plan, full: bool) -> tuple[Op, ...]:
    """Work that the backward pass repeats before it begins: the whole layer or the attention products."""
    if full:
        # The last reduction of a layer yields its output, which the next layer kept as its input.
        last = max((i for i, op in enumerate(work.forward) if isinstance(op, CollectiveOp)), default=-1)
        again = tuple(
            op._replace(phase="recompute")
            for i, op in enumerate(work.forward)
            if i != last or (isinstance(op, CollectiveOp) and op.op == "all_to_all")
        )
        if plan.stack == "megatron" or not plan.early_stop:
            return again
        # What nobody reads: the last product of a feed-forward.
        return tuple(op for op in again if op.name not in ("ffn_down", "ffn_residual"))
    again = tuple(op._replace(phase="recompute") for op in work.forward if _is_recomputed(op, plan))
    return _without_every_second_gemm(again) if "every_second_gemm" in plan.recompute_modules else again


def _is_recomputed(op: Op, plan: Plan) -> bool:
    """True if selective recomputation repeats this operation of a layer."""
    if isinstance(op, AttentionOp):
        return plan.recompute == "selective"
    if "every_second_gemm" in plan.recompute_modules and not isinstance(op, CollectiveOp):
        return True
    name = op.name.partition("_to_fp")[0]
    if "ffn" in plan.recompute_modules and name.startswith("ffn_"):
        return name not in KEPT_FFN_OPS
    if "experts" in plan.recompute_modules and name.startswith(EXPERT_OPS):
        return name not in KEPT_EXPERT_OPS
    return any(name in RECOMPUTED[module] for module in plan.recompute_modules)


def _without_every_second_gemm(ops: Iterable[Op]) -> tuple[Op, ...]:
    """The outputs of every other GEMM are kept."""
    kept_ops = []
    number = 0
    for op in ops:
        if isinstance(op, GemmOp):
            number += 1
            if number % 2:
                continue
        kept_ops.append(op)
    return tuple(kept_ops)


def embedding(model: Model, plan: Plan) -> PassOps:
    """Row lookup, and the scatter of its gradient."""
    size = plan.tokens * model.hidden * BF16
    forward: list[Op] = [Elementwise("embedding", "forward", size, size, "scatter")]
    backward: list[Op] = []
    if plan.task == "pretrain":
        rows = model.vocab_size // (plan.tp if plan.vocab_parallel else 1)
        if plan.stack != "megatron":
            backward.append(Elementwise("embedding_zero_grad", "wgrad", 0, rows * model.hidden * BF16))
        backward.append(Elementwise("embedding_grad", "wgrad", 2 * size, size, "scatter", launches=8))
    if plan.tp > 1 and plan.vocab_parallel:
        op: Literal["reduce_scatter", "all_reduce"] = (
            "reduce_scatter" if plan.sequence_parallel else "all_reduce"
        )
        forward.append(CollectiveOp("embedding_sum", "forward", op, "tp", size))
        if plan.sequence_parallel:
            backward.insert(0, CollectiveOp("embedding_gather", "dgrad", "all_gather", "tp", size))
    return PassOps(tuple(forward), tuple(backward))


def output(model: Model, plan: Plan) -> PassOps:
    """Final norm, output layer and cross entropy. torch.compile is taken to be applied to blocks alone."""
    columns = model.vocab_size // (plan.tp if plan.vocab_parallel else 1)
    split = plan.tp > 1 and plan.vocab_parallel
    norm = norm_ops("final_norm", model.hidden, plan)
    forward, backward = list[Op](norm.forward), list[Op]()
    linear = Linear("output", plan.tokens, columns, model.hidden)
    if split and plan.sequence_parallel:
        forward.append(gather_op("output_gather", "forward", model, plan))
    forward.append(forward_gemm(linear, plan, fp8=False))
    logits = float(plan.tokens) * columns
    if split and plan.gathered_logits:
        logits = float(plan.tokens) * model.vocab_size
        forward.append(CollectiveOp("logits_gather", "forward", "all_gather", "tp", BF16 * logits))
    if plan.stack == "megatron":
        forward.append(Elementwise("loss", "forward", 6 * logits, 4 * logits, "rows", launches=4))
        backward.append(Elementwise("loss_grad", "dgrad", 4 * logits, 2 * logits, "rows"))
    else:
        forward += [
            Elementwise("logits_to_fp32", "forward", 2 * logits, 4 * logits, "copy"),
            Elementwise("log_softmax", "forward", 8 * logits, 4 * logits, "rows", launches=3),
        ]
        backward += [
            Elementwise("loss_grad_zero", "dgrad", 0, 4 * logits),
            Elementwise("log_softmax_grad", "dgrad", 8 * logits, 4 * logits, "rows", launches=2),
            Elementwise("grad_to_bf16", "dgrad", 4 * logits, 2 * logits),
        ]
    backward += list(backward_gemms(linear, plan, fp8=False))
    size = stream_bytes(model, plan)
    if split and not plan.sequence_parallel:
        backward.append(CollectiveOp("output_grad_sum", "dgrad", "all_reduce", "tp", size))
    elif split:
        backward.append(CollectiveOp("output_grad_scatter", "dgrad", "reduce_scatter", "tp", size))
    return PassOps(tuple(forward), (*backward, *norm.backward))


def further_prediction(model: Model, plan: Plan, domain: int | None = None) -> PassOps:
    """A layer that predicts a token further on: joins hidden states and embedding, one block, the loss again.

    Source: DeepSeek-V3 technical report (arXiv 2412.19437), section 2.2.
    """
    join = Linear("mtp_join", outside_tokens(plan), model.hidden, 2 * model.hidden)
    size = float(outside_tokens(plan)) * 2 * model.hidden * BF16
    norms = Elementwise("mtp_norms", "forward", size, size, "rows", launches=2)
    inner = block(model, plan, model.mtp_kind, domain)
    loss = output(model, plan)
    return PassOps(
        (norms, *linear_forward(join, plan), *inner.forward, *loss.forward),
        (
            *loss.backward,
            *inner.backward,
            *linear_backward(join, plan),
            norms._replace(name="mtp_norms_grad", phase="dgrad", bytes_read=3 * size, launches=4),
        ),
    )
