"""Memory of the fullest rank: what is always there, and the largest moment of a step.

Weights, gradients and optimizer by what is really sharded; activations by what the backward pass needs.
"""

from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

import msgspec

from aorta.hardware.part import dtype_bytes
from aorta.projection import pipeline
from aorta.projection.constants import constants
from aorta.projection.model import KINDS, Model
from aorta.projection.ops import BF16, FP32
from aorta.projection.plan import Plan, split_layers
from aorta.projection.stages import local_params, mtp_params, recomputes


class MemoryConstants(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Memory beside tensors, and savings that layouts which ran can have used."""

    reserved_bytes: float
    """Context, kernels and communication library of one process."""
    fragmented: float
    """Share of the rest that the caching allocator cannot use."""
    safe: float
    """Share of the capacity below which a layout fits: allocators and libraries take what varies."""
    megatron_activations: float
    """Share of activations that Megatron can do with: recomputed norms and activations of experts, offloaded
    inputs."""
    offloaded_activations: float
    """Share of activations that stays on the device where Megatron shards weights: its recipes offload or
    recompute layers without a word in tables of results."""
    torch_activations: float
    """Share of activations that PyTorch can do with, compiled or not."""
    logits: float
    """Share of logits with a loss in place."""
    rich_activations: float
    """Activations that stacks keep beside those that the backward pass needs, over the estimate."""
    rich_logits: float
    """Copies of logits that stacks make unasked, over the estimate."""
    rich_fragmented: float
    """Share that the caching allocator loses where sizes vary most."""
    plain_norm: float
    """Bytes beside the estimate of each element of a norm that runs as a chain of operations in fp32."""


CONSTANTS = constants(MemoryConstants, "memory")


class MemoryEstimate(NamedTuple):
    """Bytes on the rank that needs most; parts add up to total_bytes."""

    parts: dict[str, float]
    capacity_bytes: float
    rank: int
    """Pipeline rank."""
    moment: str
    """Moment of the step: loss, backward pass, first reduction, or gradients."""
    lean: Mapping[str, float] = {}
    """Shares of parts that a stack can do with."""
    rich_norms_bytes: float | None = None
    """What norms keep where they run unfused; None: software whose kernels are fused, and nothing is made
    unasked."""

    @property
    def allocated_bytes(self) -> float:
        """Tensors alone, as torch.cuda.max_memory_allocated counts."""
        return sum(size for name, size in self.parts.items() if name not in ("reserved", "fragmented"))

    @property
    def total_bytes(self) -> float:
        return sum(self.parts.values())

    @property
    def least_bytes(self) -> float:
        """The least that may be needed, with savings that stacks make unasked: see MemoryConstants."""
        least = self.parts | {"fragmented": 0.0}
        for name, share in self.lean.items():
            least[name] = share * least.get(name, 0.0)
        return sum(least.values())

    @property
    def most_bytes(self) -> float:
        """The most that may be needed, with copies that stacks make unasked: see MemoryConstants."""
        if self.rich_norms_bytes is None:
            return self.total_bytes
        most = dict(self.parts)
        activations = CONSTANTS.rich_activations * most.get("activations", 0.0)
        most["activations"] = activations + self.rich_norms_bytes
        most["logits"] = CONSTANTS.rich_logits * most.get("logits", 0.0)
        del most["fragmented"]
        allocated = sum(most.values()) - most["reserved"]
        return allocated * (1 + CONSTANTS.rich_fragmented) + most["reserved"]

    @property
    def verdict(self) -> Literal["fits", "tight", "does not fit"]:
        """fits: even the most does; does not fit: not even the least; tight: between."""
        if self.most_bytes <= CONSTANTS.safe * self.capacity_bytes:
            return "fits"
        return "tight" if self.least_bytes <= self.capacity_bytes else "does not fit"

    @property
    def fits(self) -> bool:
        """True if the job may run: False only where no saving makes room."""
        return self.verdict != "does not fit"


class _Layer(NamedTuple):
    """Bytes of activations of one layer and micro-batch."""

    kept_bytes: float
    """Bytes kept from the forward pass to its backward pass."""
    backward_bytes: float
    """Bytes that the backward pass reads: more where the layer is recomputed or lies with the host."""
    offloaded_bytes: float = 0.0
    """Bytes that lie with the host between the passes."""


class _RankParams(NamedTuple):
    """Parameters of one pipeline rank, split by tp and ep alone."""

    dense: float
    expert: float
    ends: float
    """Part of dense: embedding and output."""
    largest: float
    """Largest transient of one layer."""
    layers: int


def memory(model: Model, plan: Plan, capacity_bytes: float) -> MemoryEstimate:
    """Memory of the fullest pipeline rank at its fullest moment; capacity_bytes is what a GPU has."""
    plan.check(model)
    activations = CONSTANTS.megatron_activations if plan.stack == "megatron" else CONSTANTS.torch_activations
    if plan.stack == "megatron" and plan.is_fsdp:
        activations = CONSTANTS.offloaded_activations
    lean = {"activations": activations, "logits": CONSTANTS.logits}
    if plan.grad_bytes is None and not plan.is_fsdp:
        lean["gradients"] = 0.5  # nobody says that they are kept in fp32
    if plan.low_precision and plan.stack == "megatron":
        lean["weights"] = 0.0  # kept in FP8 alone
        if plan.task == "lora":
            lean["fp8_weights"] = 0.5  # frozen: no transposed copy where the part multiplies without
    candidates = [
        _with_overhead(model, plan, parts, capacity_bytes, rank, moment, lean)
        for rank in range(plan.pp)
        for moment, parts in _moments(model, plan, rank)
    ]
    return max(candidates, key=lambda estimate: estimate.total_bytes)


def _with_overhead(
    model: Model,
    plan: Plan,
    parts: dict[str, float],
    capacity: float,
    rank: int,
    moment: str,
    lean: Mapping[str, float],
) -> MemoryEstimate:
    allocated = sum(parts.values())
    # Software whose rotation was not fused yet may have had norms that were not, whatever it recomputes.
    norms = _plain_norms(model, plan, rank) if "rope" in plan.plain_kernels else None
    return MemoryEstimate(
        parts | {"reserved": CONSTANTS.reserved_bytes, "fragmented": CONSTANTS.fragmented * allocated},
        capacity,
        rank,
        moment,
        lean,
        norms,
    )


def _plain_norms(model: Model, plan: Plan, rank: int) -> float:
    """Bytes beside the estimate that norms of all micro-batches in flight keep, or those of one layer that is
    recomputed."""
    layer_bytes = CONSTANTS.plain_norm * model.norms_per_layer * _outside(plan) * model.hidden
    if plan.recompute == "full" and plan.recompute_layers is None:
        return layer_bytes
    flying = pipeline.in_flight(
        rank, plan.pp, plan.vpp, plan.num_micro_batches, plan.schedule == "zero-bubble"
    )
    return layer_bytes * len(_layers(model, plan, rank)) * flying


def _moments(model: Model, plan: Plan, rank: int) -> list[tuple[str, dict[str, float]]]:
    rank_params = _rank_params(model, plan, rank)
    static = _static(rank_params, plan)
    layers = _layer_sizes(model, plan, _layers(model, plan, rank))
    activations = _activations_in_flight(layers, model, plan, rank)
    is_last = rank == plan.pp - 1
    columns = model.vocab_size / (plan.tp if plan.vocab_parallel and not plan.gathered_logits else 1)
    # The exact softmax and its gradient live in fp32 beside the logits.
    logits = (12 if plan.stack != "megatron" else 10) * plan.tokens * columns if is_last else 0.0
    gathered = reduced = 0.0
    if plan.is_fsdp:
        gathered = BF16 * (rank_params.ends + plan.gathered_blocks * rank_params.largest)
        # The largest gradient with the buffer in which it is reduced.
        reduced = max(rank_params.ends, rank_params.largest) * (BF16 + plan.grad_exchange_bytes)
    at_loss = {**static, "activations": activations, "logits": logits, "gathered": gathered}
    at_end = {
        **static,
        "gathered": BF16 * rank_params.ends if plan.is_fsdp else 0.0,
        "reduction_buffers": reduced,
    }
    at_end["activations"] = 0.0 if plan.is_fsdp else _last_backward(model, plan, rank)
    if plan.weight_kind != "mixed":
        # Gradients are made during the backward pass and dropped after the optimizer; with several
        # micro-batches they are there from the first one on.
        if plan.num_micro_batches == 1:
            at_loss["gradients"] = 0.0
        if plan.num_micro_batches > 1 and plan.is_fsdp:
            at_loss["reduction_buffers"] = 0.0
    moments = [("loss", at_loss), ("gradients", at_end)]
    backward = _while_backward(layers, activations)
    if backward:
        # The logits are gone. Gradients of the layers that ran backward so far are left out where they are
        # made during the pass: those of all layers are in at_end, beside the last activations.
        moments.append(("backward pass", at_loss | {"logits": 0.0, "activations": max(backward)}))
    if plan.is_fsdp:
        moments.append(("first reduction", _first_reduction(static, rank_params, plan, backward)))
    return moments


def _first_reduction(
    static: dict[str, float], rank_params: _RankParams, plan: Plan, backward: list[float]
) -> dict[str, float]:
    """The block that runs backward first is being reduced while the one before it has been gathered already
    and runs backward, the activations of all before that still there."""
    gradients = (
        static["gradients"] if plan.num_micro_batches > 1 else static["gradients"] / rank_params.layers
    )
    return static | {
        "gradients": gradients,
        "activations": backward[-2] if len(backward) > 1 else 0.0,
        "gathered": BF16 * (rank_params.ends + (rank_params.largest if rank_params.layers > 1 else 0.0)),
        "reduction_buffers": rank_params.largest * (BF16 + plan.grad_exchange_bytes),
    }


def _last_backward(model: Model, plan: Plan, rank: int) -> float:
    """Activations of the block that runs backward last, and the gradients of the widest of them.

    All other gradients are there by then, so that this is the peak where a layer has more weights than
    activations, as mixtures have.
    """
    sizes = []
    for kind in {model.layer_kind(layer) for layer in _layers(model, plan, rank)}:
        moe = KINDS[kind][1] == "moe"
        width = model.experts.ffn * model.experts.num_active if moe and model.experts else model.ffn
        split = plan.expert_tp if moe else plan.tp
        widest = BF16 * float(plan.tokens) * width / split
        sizes.append(layer_activation_bytes(model, plan, kind) + 2 * widest)
    return max(sizes, default=0.0)


def _static(rank_params: _RankParams, plan: Plan) -> dict[str, float]:
    """Weights, gradients and optimizer."""
    kind = plan.weight_kind
    parts = {"weights": 0.0, "gradients": 0.0, "optimizer": 0.0}
    for params, ranks in (
        (rank_params.dense, plan.shard_ranks),
        (rank_params.expert, plan.expert_shard_ranks),
    ):
        weights_over = ranks if plan.sharding in ("zero3", "fsdp2") else 1
        grads_over = ranks if plan.sharding in ("zero2", "zero3", "fsdp2") else 1
        states_over = 1 if plan.sharding == "ddp" else ranks
        stored_kind = "bf16" if kind == "fp32" and ranks == 1 else kind
        weight, grad, state = {
            # Shards of gradients are summed in fp32 whatever they were sent as.
            "mixed": (
                0 if plan.fp8_weights else BF16,
                FP32 if grads_over > 1 else plan.grad_exchange_bytes,
                3 * FP32,
            ),
            "fp32": (FP32, FP32, 2 * FP32),
            "bf16": (BF16, BF16, 2 * BF16),
        }[stored_kind]
        if plan.task == "lora":
            grad = state = 0
        parts["weights"] += weight * params / weights_over
        parts["gradients"] += grad * params / grads_over
        parts["optimizer"] += state * params / states_over
    if plan.low_precision and plan.stack == "megatron":
        layer_params = rank_params.dense + rank_params.expert - rank_params.ends
        parts["fp8_weights"] = 2 * layer_params / (plan.shard_ranks if plan.is_fsdp else 1)
    return parts


def _rank_params(model: Model, plan: Plan, rank: int) -> _RankParams:
    dense = expert = largest = 0.0
    by_kind: dict[str, tuple[float, float]] = {}
    own_layers = _layers(model, plan, rank)
    for layer in own_layers:
        kind = model.layer_kind(layer)
        if kind not in by_kind:
            by_kind[kind] = local_params(model, plan, kind)
        own_dense, own_expert = by_kind[kind]
        dense += own_dense
        expert += own_expert
        largest = max(largest, own_dense + own_expert)
    if plan.mtp and rank == plan.pp - 1:
        own_dense, own_expert = mtp_params(model, plan)
        dense += own_dense * model.num_mtp_layers
        expert += own_expert * model.num_mtp_layers
    vocab = model.embedding_params / (plan.tp if plan.vocab_parallel else 1)
    ends = (vocab if rank == 0 else 0.0) + (vocab if rank == plan.pp - 1 else 0.0)
    if model.tied_embeddings and plan.pp == 1:
        ends = vocab
    return _RankParams(dense + ends, expert, ends, largest, max(1, len(own_layers)))


def _layers(model: Model, plan: Plan, rank: int) -> list[int]:
    """Layers of a pipeline rank in the model's numbering."""
    counts = split_layers(
        model.num_layers, plan.pp * plan.vpp, plan.first_stage_layers, plan.last_stage_layers, ends=2
    )
    layers: list[int] = []
    for chunk in range(plan.vpp):
        position = chunk * plan.pp + rank
        begin = sum(counts[:position])
        layers += range(begin, begin + counts[position])
    return layers


def _layer_sizes(model: Model, plan: Plan, layers: Iterable[int]) -> list[_Layer]:
    """Activations of each of these layers, in their order."""
    sizes: list[_Layer] = []
    by_kind: dict[str, float] = {}
    layer_input = _outside(plan) * model.hidden * BF16
    for layer in layers:
        kind = model.layer_kind(layer)
        layer_bytes = by_kind.get(kind)
        if layer_bytes is None:
            layer_bytes = by_kind[kind] = layer_activation_bytes(model, plan, kind)
        # A layer that is recomputed keeps its input alone.
        kept_bytes = layer_input if recomputes(model, plan, layer) else layer_bytes
        offloaded = plan.activation_offload * kept_bytes
        sizes.append(_Layer(kept_bytes - offloaded, layer_bytes, offloaded))
    return sizes


def offloaded_bytes(model: Model, plan: Plan, layers: Iterable[int]) -> float:
    """Activations that these layers send to the host, and read back, for one micro-batch."""
    if not plan.activation_offload:
        return 0.0
    return sum(layer.offloaded_bytes for layer in _layer_sizes(model, plan, layers))


def _activations_in_flight(layers: list[_Layer], model: Model, plan: Plan, rank: int) -> float:
    """Bytes of all micro-batches in flight, before the first backward pass: nothing is being recomputed."""
    kept_bytes = sum(layer.kept_bytes for layer in layers)
    if rank == 0:
        kept_bytes += _outside(plan) * model.hidden * BF16
    if plan.mtp and rank == plan.pp - 1:
        kept_bytes += model.num_mtp_layers * layer_activation_bytes(model, plan, model.mtp_kind)
    flying = pipeline.in_flight(
        rank, plan.pp, plan.vpp, plan.num_micro_batches, plan.schedule == "zero-bubble"
    )
    # What the layer before is still being copied out of, beside the one that computes.
    return kept_bytes * flying + max((layer.offloaded_bytes for layer in layers), default=0.0)


def _while_backward(layers: list[_Layer], activations: float) -> list[float]:
    """Activations while each layer runs backward: it has again all that it reads, later ones are gone."""
    sizes = []
    for layer in reversed(layers):
        sizes.append(activations - layer.kept_bytes + layer.backward_bytes)
        activations -= layer.kept_bytes
    return sizes[::-1]


def layer_activation_bytes(model: Model, plan: Plan, kind: str) -> float:
    """Bytes that the backward pass of one layer and micro-batch needs, recomputing `selective` alone."""
    mixer, feed_forward = KINDS[kind]
    outside, tokens = _outside(plan), float(plan.tokens)
    # Low precision keeps what the weight gradient reads alone: the transposed copy.
    linear_input = dtype_bytes(plan.dtype) if plan.low_precision else BF16
    parts = (mixer != "none") + (feed_forward != "none")
    norms = (
        parts * outside * model.hidden * (BF16 + (0 if "norm" in plan.recompute_modules else linear_input))
    )
    heads = model.num_heads / plan.tp
    kv_heads = heads if model.latent else max(1.0, model.num_kv_heads / plan.tp)
    attention = 0.0
    if "latent_up" not in plan.recompute_modules:
        attention += BF16 * tokens * ((heads + kv_heads) * model.qk_dim + kv_heads * model.v_dim)
    if plan.recompute != "selective":
        attention += tokens * heads * (BF16 * model.v_dim + FP32)
    if model.latent:
        attention += 2 * BF16 * outside * (model.latent.q_lora_rank + model.latent.kv_lora_rank)
    if mixer == "none":
        attention = 0.0
    elif mixer == "state" and model.state is not None:
        state = model.state
        wide = state.projected + 2 * state.inner + 2 * state.num_key_heads * state.key_dim
        chunks = FP32 / state.chunk * state.num_heads * state.key_dim * state.value_dim
        attention = tokens / plan.tp * (BF16 * wide + chunks)
    if feed_forward == "none":
        return norms + attention
    return norms + attention + _ffn_activation_bytes(model, plan, feed_forward, linear_input)


def _ffn_activation_bytes(model: Model, plan: Plan, kind: str, linear_input: float) -> float:
    # gate, up and the product; an unfused product also keeps silu(gate).
    width = (3 if plan.stack == "eager" else 2) * BF16 + linear_input
    if not model.gated_ffn:
        width = BF16 + linear_input
    if "activation" in plan.recompute_modules:
        width = 2 * BF16
    if "every_second_gemm" in plan.recompute_modules:
        width = BF16  # one of gate and up
    if ("ffn" if kind == "dense" or model.experts is None else "experts") in plan.recompute_modules:
        return 0.0  # the input of the layer is kept as the norm's output
    if kind == "dense" or model.experts is None:
        return width * plan.tokens * model.ffn / plan.tp
    experts = model.experts
    tokens = float(plan.tokens) if plan.expert_tp > 1 else _outside(plan)
    rows = tokens * experts.num_active
    routed = rows * (width * experts.ffn / plan.expert_tp + model.hidden * (linear_input + BF16))
    shared = width * plan.tokens * experts.shared_width / plan.tp
    return routed + shared + 2 * FP32 * tokens * experts.num_experts


def _outside(plan: Plan) -> float:
    return plan.tokens / plan.tp if plan.sequence_parallel else float(plan.tokens)
