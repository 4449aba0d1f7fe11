"""Forward and backward work of embedding, decoder block and output, at the sizes that one rank sees.

T tokens of a micro-batch on this rank; under sequence parallelism the parts outside the GEMMs see T/tp.
Linear layer x[T, in] W[out, in]: forward (T, out, in) TN, dgrad (T, in, out) NN, wgrad (out, in, T) NT.
Column-parallel layers divide out by tp, row-parallel ones in.
"""

from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

from aorta.hardware import dtype_bytes
from aorta.projection.model import KINDS, Model
from aorta.projection.ops import AttentionOp, CollectiveOp, Elementwise, GemmOp, Op, OverlapMode, Scan
from aorta.projection.plan import Plan

BF16 = 2
FP32 = 4


class PassOps(NamedTuple):
    forward: tuple[Op, ...]
    backward: tuple[Op, ...]


class Linear(NamedTuple):
    """One GEMM with weights, several projections of the same input possibly joined in it."""

    name: str
    tokens: int
    columns: int
    rows: int
    num_inputs: int = 1
    """Gradients of the same input that the backward pass adds up."""


def block(model: Model, plan: Plan, kind: str, domain: int | None = None) -> PassOps:
    """One decoder layer of one of KINDS. backward holds no recomputation; see recomputed().

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


def _is_recomputed(op: Op, plan: Plan) -> bool:
    """True if selective recomputation repeats this operation of a layer."""
    if isinstance(op, AttentionOp):
        return plan.recompute == "selective"
    if "every_second_gemm" in plan.recompute_modules and not isinstance(op, CollectiveOp):
        return True
    name = op.name.partition("_to_fp")[0]
    if "ffn" in plan.recompute_modules and name.startswith("ffn_"):
        return name not in KEPT_OF_FFN
    if "experts" in plan.recompute_modules and name.startswith(OF_EXPERTS):
        return name not in KEPT_OF_EXPERTS
    return any(name in RECOMPUTED[module] for module in plan.recompute_modules)


KEPT_OF_FFN = ("ffn_norm", "ffn_residual", "ffn_down", "ffn_scatter", "ffn_sum")
OF_EXPERTS = ("router", "permute", "dispatch", "experts", "combine", "shared", "moe_gather")
KEPT_OF_EXPERTS = ("combine", "shared_down", "shared_scatter", "shared_sum")
"""Nothing of the backward pass reads the outputs of these."""


RECOMPUTED = {
    "norm": ("attention_norm", "ffn_norm", "latent_norm"),
    "activation": ("ffn_silu", "experts_silu", "shared_silu"),
    "latent_up": ("q_up", "k_up", "v_up"),
    "ffn": (),
    "experts": (),
    "every_second_gemm": (),
}
"""Operations of the modules of --recompute-modules."""


def further_prediction(model: Model, plan: Plan, domain: int | None = None) -> PassOps:
    """A layer that predicts a token further on: joins hidden states and embedding, one block, the loss again.

    Source: DeepSeek-V3 technical report (arXiv 2412.19437), section 2.2.
    """
    join = Linear("mtp_join", _outside_tokens(plan), model.hidden, 2 * model.hidden)
    size = float(_outside_tokens(plan)) * 2 * model.hidden * BF16
    norms = Elementwise("mtp_norms", "forward", size, size, "rows", launches=2)
    inner = block(model, plan, mtp_kind(model), domain)
    loss = output(model, plan)
    return PassOps(
        (norms, *_linear_forward(join, plan), *inner.forward, *loss.forward),
        (
            *loss.backward,
            *inner.backward,
            *_linear_backward(join, plan),
            norms._replace(name="mtp_norms_grad", phase="dgrad", bytes_read=3 * size, launches=4),
        ),
    )


def mtp_kind(model: Model) -> str:
    """Kind of the layers that predict tokens further on."""
    return "moe" if model.experts else "dense"


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
    norm = _norm("final_norm", model.hidden, plan)
    forward, backward = list[Op](norm.forward), list[Op]()
    linear = Linear("output", plan.tokens, columns, model.hidden)
    if split and plan.sequence_parallel:
        forward.append(_gather("output_gather", "forward", model, plan))
    forward.append(_forward_gemm(linear, plan, fp8=False))
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
    backward += list(_backward_gemms(linear, plan, fp8=False))
    if split and not plan.sequence_parallel:
        backward.append(
            CollectiveOp("output_grad_sum", "dgrad", "all_reduce", "tp", _stream_bytes(model, plan))
        )
    elif split:
        backward.append(
            CollectiveOp("output_grad_scatter", "dgrad", "reduce_scatter", "tp", _stream_bytes(model, plan))
        )
    return PassOps(tuple(forward), (*backward, *norm.backward))


def _attention(model: Model, plan: Plan, window: int | None) -> PassOps:
    qk_dim, v_dim = model.qk_dim, model.v_dim
    norm = _norm("attention_norm", model.hidden, plan)
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
    forward = (
        *norm.forward,
        *projections.forward,
        *rope.forward,
        *exchange.forward,
        products,
        *merge.forward,
        *after_exchange(exchange.forward, plan),
        *_linear_forward(out, plan),
        *_reduce_output("attention", model, plan),
        _residual("attention_residual", "forward", model, plan),
    )
    backward = (
        *_gather_grad("attention", model, plan),
        *_linear_backward(out, plan),
        *exchange.backward,
        products._replace(
            name="attention_grad", phase="dgrad", backward=True, launches=3 * products.launches
        ),
        *merge.backward,
        *after_exchange(exchange.backward, plan),
        *rope.backward,
        *projections.backward,
        *norm.backward,
        *_residual_grad("attention", model, plan),
    )
    return PassOps(forward, backward)


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
    return _column_parallel("attention", linears, model, plan)


def _latent_projections(model: Model, plan: Plan) -> PassOps:
    """Multi-head latent attention. The narrow projections down are not split by tp."""
    assert model.latent is not None
    shapes = model.attention_matrices
    narrow = _outside_tokens(plan)
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
        forward += _linear_forward(linear, plan)
    for linear in reversed(linears):
        backward += _linear_backward(linear, plan)
    forward.append(Elementwise("join_heads", "forward", joined, joined, "stream", launches=2))
    backward.insert(0, Elementwise("split_heads", "dgrad", joined, joined, "stream", launches=2))
    return PassOps(tuple(forward), tuple(backward))


def _state_space(model: Model, plan: Plan) -> PassOps:
    """A layer with a state space: projection in, short convolution, scan, gated norm, projection out.

    Sources: Dao and Gu, Transformers are SSMs (arXiv 2405.21060); Yang et al., Gated Delta Networks
    (arXiv 2412.06464).
    """
    state = model.state
    assert state is not None
    norm = _norm("attention_norm", model.hidden, plan)
    projections = _column_parallel(
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
        *norm.forward,
        *projections.forward,
        Elementwise("convolution", "forward", convolved, convolved),
        scan,
        Elementwise("gated_norm", "forward", 2 * inner, inner, "rows"),
        *_linear_forward(out, plan),
        *_reduce_output("attention", model, plan),
        _residual("attention_residual", "forward", model, plan),
    )
    backward = (
        *_gather_grad("attention", model, plan),
        *_linear_backward(out, plan),
        Elementwise("gated_norm_grad", "dgrad", 4 * inner, 2 * inner, "rows", launches=2),
        # The states are worked out again.
        scan._replace(
            name="scan_grad",
            phase="dgrad",
            flops=3 * scan.flops,
            size_bytes=2 * scan.size_bytes + 3 * states,
            launches=8,
        ),
        Elementwise("convolution_grad", "dgrad", 2 * convolved, convolved, launches=2),
        *projections.backward,
        *norm.backward,
        *_residual_grad("attention", model, plan),
    )
    return PassOps(forward, backward)


def _feed_forward(model: Model, plan: Plan, kind: Literal["dense", "moe"], domain: int) -> PassOps:
    norm = _norm("ffn_norm", model.hidden, plan)
    if kind == "dense" or model.experts is None:
        inner = _mlp("ffn", model, plan, plan.tokens, model.ffn // plan.tp, split=plan.tp > 1)
    else:
        inner = _experts(model, plan, domain)
    forward = (*norm.forward, *inner.forward, _residual("ffn_residual", "forward", model, plan))
    backward = (*inner.backward, *norm.backward, *_residual_grad("ffn", model, plan))
    return PassOps(forward, backward)


def _mlp(name: str, model: Model, plan: Plan, tokens: int, ffn: int, split: bool) -> PassOps:
    """Gate, up, product, down; or up, activation, down. With collectives of tp where it is split."""
    if not model.gated_ffn:
        linears = [Linear(f"{name}_up", tokens, ffn, model.hidden)]
    elif plan.stack == "megatron":
        linears = [Linear(f"{name}_gate_up", tokens, 2 * ffn, model.hidden)]
    else:
        linears = [
            Linear(f"{name}_gate", tokens, ffn, model.hidden, 2),
            Linear(f"{name}_up", tokens, ffn, model.hidden),
        ]
    down = Linear(f"{name}_down", tokens, model.hidden, ffn)
    first = _column_parallel(name, linears, model, plan) if split else _plain(linears, plan)
    act = _activation(name, float(tokens) * ffn, model, plan)
    forward = (*first.forward, *act.forward, *_linear_forward(down, plan))
    backward = (*_linear_backward(down, plan), *act.backward, *first.backward)
    if split:
        forward = (*forward, *_reduce_output(name, model, plan))
        backward = (*_gather_grad(name, model, plan), *backward)
    return PassOps(forward, backward)


def _experts(model: Model, plan: Plan, domain: int) -> PassOps:
    """Router, permutation, exchange over ep, grouped GEMMs, and back. Routing is taken as balanced."""
    experts = model.experts
    assert experts is not None
    split = plan.expert_tp > 1
    tokens = plan.tokens if split or not plan.sequence_parallel else _outside_tokens(plan)
    rows = tokens * experts.num_active
    local = experts.num_experts // plan.ep
    per_expert = max(1, round(rows * plan.ep / experts.num_experts))
    width = model.hidden * BF16
    forward: list[Op] = []
    backward: list[Op] = []
    if split:
        forward.append(_gather("moe_gather", "forward", model, plan))
        backward.append(_gather("moe_grad_gather", "dgrad", model, plan))

    router = Linear("router", tokens, experts.num_experts, model.hidden)
    scores = float(tokens) * experts.num_experts * FP32
    forward += [
        _forward_gemm(router, plan, fp8=False),
        Elementwise("router_scores", "forward", 3 * scores, 2 * scores, "rows", launches=6),
        Elementwise("permute", "forward", rows * width, rows * width, "scatter", launches=4),
    ]
    if experts.latent:
        width = experts.latent * BF16
        narrow = Linear("experts_narrow", tokens, experts.latent, model.hidden)
        widen = Linear("experts_widen", tokens, model.hidden, experts.latent)
        forward += _linear_forward(narrow, plan)
    exchange = CollectiveOp(
        "dispatch", "forward", "all_to_all", "ep", float(rows) * width * _sent_share(model, plan, domain)
    )
    if plan.ep > 1:
        forward.append(exchange)
    grouped = _grouped(model, plan, local, per_expert, experts.ffn // plan.expert_tp)
    forward += grouped.forward
    if plan.ep > 1:
        forward.append(exchange._replace(name="combine"))
    forward.append(Elementwise("unpermute", "forward", rows * width, tokens * width, "scatter", launches=3))
    if experts.latent:
        forward += _linear_forward(widen, plan)
        backward += _linear_backward(widen, plan)
    backward.append(Elementwise("unpermute_grad", "dgrad", rows * width, rows * width, "scatter", launches=4))
    if plan.ep > 1:
        backward.append(exchange._replace(name="combine_grad", phase="dgrad"))
    backward += grouped.backward
    if plan.ep > 1:
        backward.append(exchange._replace(name="dispatch_grad", phase="dgrad"))
    backward += [
        Elementwise("permute_grad", "dgrad", rows * width, tokens * width, "scatter", launches=3),
        *(_linear_backward(narrow, plan) if experts.latent else ()),
        Elementwise("router_grad", "dgrad", 3 * scores, scores, "rows", launches=6),
        *_backward_gemms(router, plan, fp8=False),
    ]
    if split:
        forward.append(
            CollectiveOp("moe_scatter", "forward", "reduce_scatter", "tp", _stream_bytes(model, plan))
        )
        backward.append(
            CollectiveOp("moe_grad_scatter", "dgrad", "reduce_scatter", "tp", _stream_bytes(model, plan))
        )
    if experts.shared_width:
        shared = _mlp("shared", model, plan, plan.tokens, experts.shared_width // plan.tp, plan.tp > 1)
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
            forward.append(_cast(name, "forward", elements * rows, plan))
            backward.insert(0, _cast(f"{name}_grad", "dgrad", elements * columns, plan))
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
    act = _activation("experts", elements * ffn, model, plan)
    forward += act.forward
    backward[0:0] = act.backward
    linear("experts_down", width, ffn)
    return PassOps(tuple(forward), tuple(backward))


def _column_parallel(name: str, linears: list[Linear], model: Model, plan: Plan) -> PassOps:
    """Layers on a gathered input; the gradient of the input is reduced once for all of them."""
    work = _plain(linears, plan)
    if plan.tp == 1:
        return work
    size = _stream_bytes(model, plan)
    count = 1 if plan.joined_input_grads else len(linears)
    overlap: OverlapMode = "chunks_next" if plan.tp_overlap else ""
    if plan.sequence_parallel:
        gather = CollectiveOp(f"{name}_gather", "forward", "all_gather", "tp", size, overlap, launches=count)
        # The gathered input is not kept: the weight gradient gathers it again beside the GEMMs.
        again = CollectiveOp(f"{name}_regather", "dgrad", "all_gather", "tp", size, "next")
        scatter = CollectiveOp(
            f"{name}_grad_scatter",
            "dgrad",
            "reduce_scatter",
            "tp",
            size,
            "chunks_previous" if plan.tp_overlap else "",
            launches=count,
        )
        return PassOps((gather, *work.forward), (again, *work.backward, scatter))
    reduce = CollectiveOp(f"{name}_grad_sum", "dgrad", "all_reduce", "tp", size, launches=count)
    return PassOps(work.forward, (*work.backward, reduce))


def _plain(linears: list[Linear], plan: Plan) -> PassOps:
    forward: list[Op] = []
    backward: list[Op] = []
    for number, linear in enumerate(linears):
        forward += _linear_forward(linear, plan, cast=number == 0)
    for linear in reversed(linears):
        backward += _linear_backward(linear, plan)
    return PassOps(tuple(forward), tuple(backward))


def _linear_forward(linear: Linear, plan: Plan, cast: bool = True) -> Iterator[Op]:
    if plan.low_precision and cast:
        yield _cast(linear.name, "forward", float(linear.tokens) * linear.rows, plan)
    yield _forward_gemm(linear, plan)
    if _has_adapter(linear, plan):
        name, rank, wide = f"{linear.name}_adapter", plan.adapter_rank, BF16 * float(linear.tokens)
        yield GemmOp(f"{name}_down", "forward", linear.tokens, rank, linear.rows, "TN")
        yield GemmOp(f"{name}_up", "forward", linear.tokens, linear.columns, rank, "TN")
        yield Elementwise(f"{name}_sum", "forward", 2 * wide * linear.columns, wide * linear.columns)


def _linear_backward(linear: Linear, plan: Plan) -> Iterator[Op]:
    if plan.low_precision:
        yield _cast(f"{linear.name}_grad", "dgrad", float(linear.tokens) * linear.columns, plan)
    yield from _backward_gemms(linear, plan)
    if _has_adapter(linear, plan):
        name, rank, wide = f"{linear.name}_adapter", plan.adapter_rank, BF16 * float(linear.tokens)
        yield GemmOp(f"{name}_up_dgrad", "dgrad", linear.tokens, rank, linear.columns, "NN")
        yield GemmOp(f"{name}_up_wgrad", "wgrad", linear.columns, rank, linear.tokens, "NT")
        yield GemmOp(f"{name}_down_dgrad", "dgrad", linear.tokens, linear.rows, rank, "NN")
        yield GemmOp(f"{name}_down_wgrad", "wgrad", rank, linear.rows, linear.tokens, "NT")
        yield Elementwise(f"{name}_grad_sum", "dgrad", 2 * wide * linear.rows, wide * linear.rows)
    if linear.num_inputs > 1:
        size = float(linear.tokens) * linear.rows * BF16 * (linear.num_inputs - 1)
        yield Elementwise(
            f"{linear.name}_input_grad_sum", "dgrad", 2 * size, size, launches=linear.num_inputs - 1
        )


def _has_adapter(linear: Linear, plan: Plan) -> bool:
    """True if LoRA trains two narrow matrices beside this layer."""
    if plan.task != "lora" or plan.adapters == "none":
        return False
    return plan.adapters == "all" or linear.name in ATTENTION_LINEARS


ATTENTION_LINEARS = ("qkv", "query", "key", "value", "attention_out", "q_up", "k_up", "v_up")
"""Projections of the attention, by their names."""


def _forward_gemm(linear: Linear, plan: Plan, fp8: bool = True) -> GemmOp:
    dtype = plan.dtype if fp8 else "bf16"
    return GemmOp(linear.name, "forward", linear.tokens, linear.columns, linear.rows, "TN", dtype)


def _backward_gemms(linear: Linear, plan: Plan, fp8: bool = True) -> Iterator[GemmOp]:
    dtype = plan.dtype if fp8 else "bf16"
    name, tokens, columns, rows, _ = linear
    yield GemmOp(f"{name}_dgrad", "dgrad", tokens, rows, columns, "NN", dtype)
    if plan.task == "pretrain":
        yield GemmOp(f"{name}_wgrad", "wgrad", columns, rows, tokens, "NT", dtype)


def _cast(name: str, phase: Literal["forward", "dgrad"], elements: float, plan: Plan) -> Elementwise:
    """A cast to FP8 or FP4, as it is and transposed, with the maximum taken in the same pass."""
    width = 2 * dtype_bytes(plan.dtype)
    return Elementwise(f"{name}_to_{plan.dtype}", phase, BF16 * elements, width * elements, "stream")


def _norm(name: str, hidden: int, plan: Plan) -> PassOps:
    size = float(_outside_tokens(plan)) * hidden * BF16
    is_fused = plan.stack != "eager"
    return PassOps(
        (Elementwise(name, "forward", size, size, "rows"),),
        (Elementwise(f"{name}_grad", "dgrad", (3 if is_fused else 4) * size, size, "rows", launches=2),),
    )


def _residual(name: str, phase: Literal["forward"], model: Model, plan: Plan) -> Op:
    size = float(_outside_tokens(plan)) * model.hidden * BF16
    return Elementwise(name, phase, 2 * size, size)


def _residual_grad(name: str, model: Model, plan: Plan) -> tuple[Op, ...]:
    size = float(_outside_tokens(plan)) * model.hidden * BF16
    return (Elementwise(f"{name}_residual_grad", "dgrad", 2 * size, size),)


def _rope(elements: float, plan: Plan) -> PassOps:
    """Rotation of queries and keys. elements: of both."""
    size = elements * BF16
    if plan.stack == "eager":
        # x cos + join(-second, first) sin: two products, a negation of half, a join and a sum.
        forward = Elementwise("rope", "forward", 5.5 * size, 4.5 * size, "strided", launches=10)
        backward = Elementwise("rope_grad", "dgrad", 6.5 * size, 5.5 * size, "strided", launches=12)
    else:
        forward = Elementwise("rope", "forward", size, size, launches=2)
        backward = Elementwise("rope_grad", "dgrad", size, size, launches=2)
    return PassOps((forward,), (backward,))


def _activation(name: str, elements: float, model: Model, plan: Plan) -> PassOps:
    """silu(gate) up; or one function of one input."""
    size = elements * BF16
    if not model.gated_ffn:
        return PassOps(
            (Elementwise(f"{name}_silu", "forward", size, size),),
            (Elementwise(f"{name}_silu_grad", "dgrad", 2 * size, size),),
        )
    if plan.stack == "eager":
        forward = Elementwise(f"{name}_silu", "forward", 3 * size, 2 * size, launches=2)
        backward = Elementwise(f"{name}_silu_grad", "dgrad", 6 * size, 3 * size, launches=3)
    else:
        forward = Elementwise(f"{name}_silu", "forward", 2 * size, size)
        backward = Elementwise(f"{name}_silu_grad", "dgrad", 3 * size, 2 * size)
    return PassOps((forward,), (backward,))


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


def after_exchange(ops: Iterable[Op], plan: Plan) -> tuple[Op, ...]:
    """Back from split heads to a split sequence, where the way there was an all-to-all."""
    if plan.cp == 1 or plan.cp_exchange != "all_to_all":
        return ()
    return tuple(op._replace(name=f"{op.name}_back") for op in ops if isinstance(op, CollectiveOp))[:1]


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


def _reduce_output(name: str, model: Model, plan: Plan) -> Iterable[Op]:
    """The reduction after a row-parallel layer, where every rank holds a partial sum."""
    if plan.tp == 1:
        return ()
    size = _stream_bytes(model, plan)
    if plan.sequence_parallel:
        overlap: OverlapMode = "chunks_previous" if plan.tp_overlap else ""
        return (CollectiveOp(f"{name}_scatter", "forward", "reduce_scatter", "tp", size, overlap),)
    return (CollectiveOp(f"{name}_sum", "forward", "all_reduce", "tp", size),)


def _gather_grad(name: str, model: Model, plan: Plan) -> Iterable[Op]:
    if plan.tp == 1 or not plan.sequence_parallel:
        return ()
    overlap: OverlapMode = "chunks_next" if plan.tp_overlap else ""
    size = _stream_bytes(model, plan)
    return (CollectiveOp(f"{name}_grad_gather", "dgrad", "all_gather", "tp", size, overlap),)


def _gather(name: str, phase: Literal["forward", "dgrad"], model: Model, plan: Plan) -> CollectiveOp:
    return CollectiveOp(name, phase, "all_gather", "tp", _stream_bytes(model, plan))


def _stream_bytes(model: Model, plan: Plan) -> float:
    """The hidden states of a micro-batch."""
    return float(plan.tokens) * model.hidden * BF16


def _outside_tokens(plan: Plan) -> int:
    """Tokens that norms and residuals of one rank see."""
    return plan.tokens // plan.tp if plan.sequence_parallel else plan.tokens
