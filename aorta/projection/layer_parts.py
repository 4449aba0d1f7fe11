"""Parts that layers are made of: linear layers, norms, activations, residuals, with their collectives of tp.

Linear layer x[T, in] W[out, in]: forward (T, out, in) TN, dgrad (T, in, out) NN, wgrad (out, in, T) NT.
Column-parallel layers divide out by tp, row-parallel ones in.
"""

from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

from aorta.hardware.part import dtype_bytes
from aorta.projection.model import Model
from aorta.projection.ops import BF16, Access, CollectiveOp, Elementwise, GemmOp, Op, OverlapMode
from aorta.projection.plan import Plan


class PassOps(NamedTuple):
    forward: tuple[Op, ...]
    backward: tuple[Op, ...]


class Linear(NamedTuple):
    """A GEMM with weights; several projections of the same input may be joined in it."""

    name: str
    tokens: int
    columns: int
    rows: int
    num_inputs: int = 1
    """Gradients of the same input that the backward pass adds up."""


def mlp(name: str, model: Model, plan: Plan, tokens: int, ffn: int, split: bool) -> PassOps:
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
    first = column_parallel(name, linears, model, plan) if split else _plain(linears, plan)
    act = activation(name, float(tokens) * ffn, model, plan)
    forward = (*first.forward, *act.forward, *linear_forward(down, plan))
    backward = (*linear_backward(down, plan), *act.backward, *first.backward)
    if split:
        forward = (*forward, *reduce_output(name, model, plan))
        backward = (*gather_grad(name, model, plan), *backward)
    return PassOps(forward, backward)


def column_parallel(name: str, linears: list[Linear], model: Model, plan: Plan) -> PassOps:
    """Layers on a gathered input; the gradient of the input is reduced once for all of them."""
    work = _plain(linears, plan)
    if plan.tp == 1:
        return work
    size = stream_bytes(model, plan)
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
        forward += linear_forward(linear, plan, cast=number == 0)
    for linear in reversed(linears):
        backward += linear_backward(linear, plan)
    return PassOps(tuple(forward), tuple(backward))


def linear_forward(linear: Linear, plan: Plan, cast: bool = True) -> Iterator[Op]:
    if plan.low_precision and cast:
        yield cast_op(linear.name, "forward", float(linear.tokens) * linear.rows, plan)
    yield forward_gemm(linear, plan)
    if _has_adapter(linear, plan):
        name, rank, wide = f"{linear.name}_adapter", plan.adapter_rank, BF16 * float(linear.tokens)
        yield GemmOp(f"{name}_down", "forward", linear.tokens, rank, linear.rows, "TN")
        yield GemmOp(f"{name}_up", "forward", linear.tokens, linear.columns, rank, "TN")
        yield Elementwise(f"{name}_sum", "forward", 2 * wide * linear.columns, wide * linear.columns)


def linear_backward(linear: Linear, plan: Plan) -> Iterator[Op]:
    if plan.low_precision:
        yield cast_op(f"{linear.name}_grad", "dgrad", float(linear.tokens) * linear.columns, plan)
    yield from backward_gemms(linear, plan)
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


def forward_gemm(linear: Linear, plan: Plan, fp8: bool = True) -> GemmOp:
    dtype = plan.dtype if fp8 else "bf16"
    return GemmOp(linear.name, "forward", linear.tokens, linear.columns, linear.rows, "TN", dtype)


def backward_gemms(linear: Linear, plan: Plan, fp8: bool = True) -> Iterator[GemmOp]:
    dtype = plan.dtype if fp8 else "bf16"
    name, tokens, columns, rows, _ = linear
    yield GemmOp(f"{name}_dgrad", "dgrad", tokens, rows, columns, "NN", dtype)
    if plan.task == "pretrain":
        yield GemmOp(f"{name}_wgrad", "wgrad", columns, rows, tokens, "NT", dtype)


def cast_op(name: str, phase: Literal["forward", "dgrad"], elements: float, plan: Plan) -> Elementwise:
    """A cast to FP8 or FP4, as it is and transposed, with the maximum taken in the same pass."""
    width = 2 * dtype_bytes(plan.dtype)
    return Elementwise(f"{name}_to_{plan.dtype}", phase, BF16 * elements, width * elements, "stream")


def norm_ops(name: str, hidden: int, plan: Plan) -> PassOps:
    size = float(outside_tokens(plan)) * hidden * BF16
    if "norm" in plan.plain_kernels:
        # To fp32, square, mean, product, to bf16, product with the weight; and back.
        return elementwise(name, size, (10, 8), (20, 13), launches=(7, 14))
    is_fused = plan.stack != "eager"
    return elementwise(name, size, (1, 1), (3 if is_fused else 4, 1), "rows", launches=(1, 2))


def activation(name: str, elements: float, model: Model, plan: Plan) -> PassOps:
    """silu(gate) up; or one function of one input."""
    name, size = f"{name}_silu", elements * BF16
    if not model.gated_ffn:
        return elementwise(name, size, (1, 1), (2, 1))
    if plan.stack == "eager":
        return elementwise(name, size, (3, 2), (6, 3), launches=(2, 3))
    return elementwise(name, size, (2, 1), (3, 2))


def elementwise(
    name: str,
    size: float,
    forward: tuple[float, float],
    backward: tuple[float, float],
    access: Access = "stream",
    launches: tuple[int, int] = (1, 1),
) -> PassOps:
    """An operation and its gradient, each by how often it reads and writes arrays of size bytes."""
    (read, written), (grad_read, grad_written) = forward, backward
    op = Elementwise(name, "forward", read * size, written * size, access, launches=launches[0])
    grad = Elementwise(
        f"{name}_grad", "dgrad", grad_read * size, grad_written * size, access, launches=launches[1]
    )
    return PassOps((op,), (grad,))


def residual(name: str, phase: Literal["forward"], model: Model, plan: Plan) -> Op:
    size = float(outside_tokens(plan)) * model.hidden * BF16
    return Elementwise(name, phase, 2 * size, size)


def residual_grad(name: str, model: Model, plan: Plan) -> tuple[Op, ...]:
    size = float(outside_tokens(plan)) * model.hidden * BF16
    return (Elementwise(f"{name}_residual_grad", "dgrad", 2 * size, size),)


def reduce_output(name: str, model: Model, plan: Plan) -> Iterable[Op]:
    """The reduction after a row-parallel layer, where every rank holds a partial sum."""
    if plan.tp == 1:
        return ()
    size = stream_bytes(model, plan)
    if plan.sequence_parallel:
        overlap: OverlapMode = "chunks_previous" if plan.tp_overlap else ""
        return (CollectiveOp(f"{name}_scatter", "forward", "reduce_scatter", "tp", size, overlap),)
    return (CollectiveOp(f"{name}_sum", "forward", "all_reduce", "tp", size),)


def gather_grad(name: str, model: Model, plan: Plan) -> Iterable[Op]:
    if plan.tp == 1 or not plan.sequence_parallel:
        return ()
    overlap: OverlapMode = "chunks_next" if plan.tp_overlap else ""
    size = stream_bytes(model, plan)
    return (CollectiveOp(f"{name}_grad_gather", "dgrad", "all_gather", "tp", size, overlap),)


def gather_op(name: str, phase: Literal["forward", "dgrad"], model: Model, plan: Plan) -> CollectiveOp:
    return CollectiveOp(name, phase, "all_gather", "tp", stream_bytes(model, plan))


def stream_bytes(model: Model, plan: Plan) -> float:
    """The hidden states of a micro-batch."""
    return float(plan.tokens) * model.hidden * BF16


def outside_tokens(plan: Plan) -> int:
    """Tokens that norms and residuals of one rank see."""
    return plan.tokens // plan.tp if plan.sequence_parallel else plan.tokens
