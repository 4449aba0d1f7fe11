"""How a job runs: layout of the GPUs, batch, precision, sharding and what the software does.

`Plan` holds the settings and refuses, in `check`, what does not fit a model; split_layers spreads the layers
over the stages of a pipeline.
"""

from functools import lru_cache
from typing import Literal, NamedTuple

import msgspec

from aorta.errors import ConfigError
from aorta.projection.model import Model

Sharding = Literal["ddp", "zero1", "zero2", "zero3", "fsdp2"]
Schedule = Literal["1f1b", "interleaved", "zero-bubble"]
Stack = Literal["eager", "compiled", "megatron"]
DType = Literal["bf16", "fp8", "fp4"]
Recompute = Literal["none", "selective", "full"]
RecomputeModule = Literal["norm", "activation", "latent_up", "ffn", "experts", "every_second_gemm"]
MOST = 10**9
"""Largest number of GPUs, of tokens of a micro-batch, and of any count: no size overflows below it."""
RATES = ("step_ms", "tokens_per_s_per_gpu")
"""Keys of a job's file that say what was measured of it."""
COUNTS = (
    "nodes",
    "gpus_per_node",
    "dp",
    "tp",
    "pp",
    "vpp",
    "cp",
    "ep",
    "replicas",
    "micro_batch_size",
    "seq_len",
)


class MeshAxis(NamedTuple):
    """Groups of ranks along one axis; pp: pairs of neighbouring stages."""

    num_ranks: int
    stride: int
    """Ranks from one member of a group to the next."""


class RestsOn(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A setting that rows of one model told."""

    setting: str
    model: str
    left_out: float
    """Log error that 87 % of the model's rows stay below without the setting."""


class Plan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything about a job but its model and its hardware; options.py and software.py make one."""

    nodes: int = 1
    gpus_per_node: int = 8
    dp: int = 1
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    """Chunks of the model per pipeline rank."""
    cp: int = 1
    ep: int = 1
    micro_batch_size: int = 1
    global_batch_size: int = 8
    seq_len: int = 4096
    dtype: DType = "bf16"
    """Precision of the linear layers of the blocks; attention, router and output layer stay bf16."""
    recompute: Recompute = "none"
    """selective: the attention products alone."""
    recompute_modules: tuple[RecomputeModule, ...] = ()
    """Parts of every layer that are recomputed, beside what `recompute` says. latent_up: the projections up
    from the latents of multi-head latent attention. ffn: dense feed-forwards. experts: layers of experts,
    exchanges included. every_second_gemm: with all element-wise work, what torchtitan calls selective."""
    recompute_layers: int | None = None
    """Layers that full recomputation covers, spread evenly over the model; None: all."""
    activation_offload: float = 0.0
    """Share of the activations that layers keep for the backward pass which lies in the host's memory between
    the passes, copied beside the compute of other layers."""
    early_stop: bool = True
    """Full recomputation outside Megatron stops when all saved tensors are back, as torch's
    checkpoints do from 2.1 on and its compiler does; its last product is not."""
    sharding: Sharding = "zero1"
    sequence_parallel: bool = True
    vocab_parallel: bool = True
    """Embedding and output layer split over tp."""
    schedule: Schedule = "1f1b"
    """Schedule of the pipeline. With vpp above 1, 1f1b is its interleaved form."""
    first_stage_layers: int | None = None
    last_stage_layers: int | None = None
    stack: Stack = "megatron"
    """Software of the arithmetic. eager: one kernel per operation of PyTorch; compiled: element-wise chains
    fused by torch.compile; megatron: hand-fused norms, RoPE, SwiGLU and loss, gradients added in place."""
    plain_kernels: tuple[Literal["norm", "rope"], ...] = ()
    """Parts that run as chains of PyTorch's own operations, whatever else is fused: RMSNorm, rotation."""
    joined_input_grads: bool = True
    """One exchange of the input, or of its gradient, for all column-parallel layers that share the input;
    False: one for each layer, as torch's ColwiseParallel does by itself."""
    gathered_logits: bool = False
    """Logits are gathered, and every rank computes the whole loss; needs vocab_parallel."""
    tp_overlap: bool = False
    """Collectives of tensor parallelism in chunks beside the GEMM that feeds or follows them."""
    moe_grouped_gemm: Literal["turbo", "legacy"] = "turbo"
    deepep: bool = False
    ep_overlap: bool = False
    """Tokens of one micro-batch travel between experts while another one computes; needs a pipeline."""
    attention: Literal["cudnn", "flash", "unfused", "unfused_windows"] | None = None
    """Kernel family; None: the usual one of the hardware. unfused: GEMMs with a softmax in memory between;
    unfused_windows: so in layers with a window alone, over the whole sequence."""
    task: Literal["pretrain", "lora"] = "pretrain"
    """lora: the base model is frozen and has no weight gradients, optimizer or gradient exchange."""
    adapters: Literal["none", "attention", "all"] = "attention"
    """Linear layers with an adapter, with lora."""
    adapter_rank: int = 16
    dp_overlap: bool = True
    """Without FSDP: gathers of weights run beside the first forward pass and reductions of gradients beside
    the last backward pass; False: before and after them."""
    fp8_weights: bool = False
    """Weights are kept in FP8 alone, beside the optimizer's fp32 masters; needs fp8."""
    cp_exchange: Literal["ring", "all_gather", "all_to_all"] = "ring"
    """Exchange of keys between ranks of context parallelism. ring: step by step beside the attention;
    all_gather: all before the attention begins; all_to_all: whole sequences of fewer heads (Ulysses)."""
    replicas: int = 1
    """Copies of the sharded weights (HSDP): sharded over dp x cp / replicas neighbouring ranks, gradients
    also summed over the copies."""
    reshard_after_forward: bool = True
    """FSDP: weights are dropped after the forward pass and gathered again for the backward pass."""
    forward_prefetch: int = 0
    """FSDP2: blocks that are gathered explicitly ahead of the one that runs forward. 0: the host gathers one
    more while a block runs, as it does by itself."""
    backward_prefetch: int = 1
    """FSDP2: blocks that are gathered ahead of the one that runs backward."""
    grad_sync: Literal["each", "last"] = "each"
    """FSDP: gradients are reduced in every micro-batch, or once in the last one."""
    expert_tp_size: int | None = None
    """GPUs that split one expert; None: tp without ep, else 1."""
    host_factor: float = 1.0
    """Host time of layers of experts over that of the releases it was fitted on; see stacks/."""
    expert_factor: float = 1.0
    """Kernels of routed experts (grouped GEMMs, conversions, permutations) over the model's; see stacks/."""
    attention_factor: float = 1.0
    """Attention kernels as the software runs them over the kernel family's; see stacks/."""
    slowdown: float = 1.0
    """Compute kernels of the software's generation over today's; see stacks/."""
    cuda_graphs: bool = False
    """Layers are launched as recorded graphs, routed experts excepted."""
    fp8_scaling: Literal["tensor", "mx"] = "tensor"
    """mx: a scale for each block of 32 numbers. Read by rules in stacks/ alone: conversions cost the same."""
    mtp: bool = False
    """Train the model's layers for tokens further on as well, on the last stage."""
    fsdp_overlap: float | None = None
    """What-if: share of FSDP's collectives that is hidden, whatever the timeline says."""
    software: str = ""
    """Framework and release that the settings are of, as in nemo@25.04. Says how sure a projection is, and
    changes no time."""
    rests_on: tuple[RestsOn, ...] = ()
    """Settings of the software that rows of one model told. They widen the interval, and change no time."""
    weights: Literal["mixed", "fp32", "bf16"] | None = None
    """mixed: bf16 weights, fp32 gradients and fp32 masters with the optimizer; fp32: fp32 shards that are
    gathered as bf16; bf16: everything. None: mixed for megatron, else fp32 when sharded and bf16 when not."""
    grad_bytes: int | None = None
    """Bytes per element in the gradient exchange; None: 4, and 2 under zero3."""

    @property
    def world_size(self) -> int:
        return self.dp * self.tp * self.pp * self.cp

    @property
    def low_precision(self) -> bool:
        """Linear layers multiply in a type that operands are converted to first."""
        return self.dtype in ("fp8", "fp4")

    @property
    def num_micro_batches(self) -> int:
        return self.global_batch_size // (self.micro_batch_size * self.dp)

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch on a context-parallel rank."""
        return self.micro_batch_size * self.seq_len // self.cp

    @property
    def is_fsdp(self) -> bool:
        """Weights are gathered layer by layer."""
        return self.sharding in ("zero3", "fsdp2") and self.shard_ranks > 1

    @property
    def gathered_blocks(self) -> int:
        """Blocks whose gathered weights FSDP holds at once: the one that runs, and those ahead of it."""
        return 1 + max(1, self.forward_prefetch, self.backward_prefetch)

    @property
    def shard_ranks(self) -> int:
        """Ranks over which weights, gradients or optimizer of the dense layers are sharded or reduced."""
        return self.dp * self.cp // self.replicas

    @property
    def expert_tp(self) -> int:
        if self.expert_tp_size is not None:
            return self.expert_tp_size
        return self.tp if self.ep == 1 else 1

    @property
    def expert_shard_ranks(self) -> int:
        """Ranks that hold the same experts."""
        return max(1, self.world_size // self.pp // self.ep // self.expert_tp // self.replicas)

    def mesh_axis(self, axis: str) -> MeshAxis:
        """Size and stride of the groups along an axis of the mesh; copies: over which HSDP sums gradients."""
        axes = {
            "tp": MeshAxis(self.tp, 1),
            "cp": MeshAxis(self.cp, self.tp),
            "dp": MeshAxis(self.shard_ranks, self.tp),
            "ep": MeshAxis(self.ep, self.expert_tp),
            "edp": MeshAxis(self.expert_shard_ranks, self.ep * self.expert_tp),
            "copies": MeshAxis(self.replicas, self.tp * self.shard_ranks),
            "pp": MeshAxis(2, self.world_size // self.pp),
        }
        if axis not in axes:
            raise ConfigError(f"{axis} is no axis of the mesh")
        return axes[axis]

    @property
    def weight_kind(self) -> Literal["mixed", "fp32", "bf16"]:
        if self.weights is not None:
            return self.weights
        if self.stack == "megatron":
            return "mixed"
        return "fp32" if self.is_fsdp else "bf16"

    @property
    def grad_exchange_bytes(self) -> int:
        if self.grad_bytes is not None:
            return self.grad_bytes
        return 2 if self.sharding == "zero3" else 4

    def check(self, model: Model) -> None:
        """Raise where model and plan do not fit together."""
        _positive(self)
        _world(self)
        _batch(self)
        _splits(self, model)
        _combinations(self, model)
        _stages(self, model)


def _positive(plan: Plan) -> None:
    if min(plan.nodes, plan.gpus_per_node) > 0 and plan.nodes * plan.gpus_per_node > MOST:
        raise ConfigError(
            f"--nodes {plan.nodes} x --gpus-per-node {plan.gpus_per_node} are more than {MOST} GPUs"
        )
    for name in COUNTS:
        check_count(name, getattr(plan, name))
    if plan.micro_batch_size * plan.seq_len > MOST:
        raise ConfigError(
            f"--micro-batch-size {plan.micro_batch_size} x --seq-len {plan.seq_len} are more than {MOST} "
            "tokens; a smaller micro-batch would work"
        )
    check_count("global_batch_size", plan.global_batch_size, maximum=MOST**2)
    if plan.fsdp_overlap is not None and not 0 <= plan.fsdp_overlap <= 1:
        raise ConfigError(f"--fsdp-overlap is a share between 0 and 1, got {plan.fsdp_overlap}")
    if not 0 <= plan.activation_offload <= 1:
        raise ConfigError(f"--activation-offload is a share between 0 and 1, got {plan.activation_offload}")


def _world(plan: Plan) -> None:
    gpus = plan.nodes * plan.gpus_per_node
    if plan.world_size != gpus:
        raise ConfigError(
            f"dp {plan.dp} x tp {plan.tp} x pp {plan.pp} x cp {plan.cp} = {plan.world_size} GPUs, but "
            f"--nodes {plan.nodes} x --gpus-per-node {plan.gpus_per_node} = {gpus}"
        )
    if plan.tp > plan.gpus_per_node:
        raise ConfigError(f"--tp {plan.tp} does not fit into --gpus-per-node {plan.gpus_per_node}")
    expert_world = plan.world_size // plan.pp
    if expert_world % (plan.ep * plan.expert_tp):
        raise ConfigError(f"--ep {plan.ep} x {plan.expert_tp} must divide dp x cp x tp = {expert_world}")


def _batch(plan: Plan) -> None:
    step = plan.micro_batch_size * plan.dp
    if plan.num_micro_batches * step != plan.global_batch_size or not plan.num_micro_batches:
        usable_batch = max(step, plan.global_batch_size // step * step)
        raise ConfigError(
            f"--global-batch-size {plan.global_batch_size} must be a multiple of "
            f"micro-batch {plan.micro_batch_size} x dp {plan.dp} = {step}; {usable_batch} would work"
        )


def _splits(plan: Plan, model: Model) -> None:
    for dimension, amount, parts in (
        ("num_heads", model.num_heads, "tp"),
        ("ffn", model.ffn, "tp"),
        ("--seq-len", plan.seq_len, "cp"),
    ):
        if amount % getattr(plan, parts):
            raise ConfigError(f"--{parts} {getattr(plan, parts)} must divide {dimension} {amount}")
    if plan.sequence_parallel and plan.tokens % plan.tp:
        raise ConfigError(f"--tp {plan.tp} must divide the tokens of a micro-batch {plan.tokens}")
    if plan.ep > 1 and model.experts is None:
        raise ConfigError(f"--ep {plan.ep}: {model.name} has no experts")
    if model.experts and model.experts.num_experts % plan.ep:
        raise ConfigError(
            f"--ep {plan.ep} must divide the {model.experts.num_experts} experts of {model.name}"
        )


def _combinations(plan: Plan, model: Model) -> None:
    if plan.schedule == "interleaved" and plan.vpp == 1:
        raise ConfigError("--schedule interleaved needs --vpp above 1")
    if plan.schedule == "zero-bubble" and (plan.vpp > 1 or plan.pp == 1):
        raise ConfigError("--schedule zero-bubble needs --pp above 1 and --vpp 1")
    if plan.schedule == "zero-bubble" and plan.recompute != "none":
        raise ConfigError("--schedule zero-bubble splits the backward pass and has no --recompute")
    if plan.recompute_layers is not None and not 0 < plan.recompute_layers <= model.num_layers:
        raise ConfigError(
            f"--recompute {plan.recompute_layers} must be between 1 and {model.num_layers} layers"
        )
    if plan.deepep and (model.experts is None or plan.ep == 1):
        raise ConfigError("--enable-deepep needs a model with experts and --ep above 1")
    gathers_weights = plan.is_fsdp
    if plan.ep_overlap and (model.experts is None or plan.ep == 1 or plan.pp == 1 or gathers_weights):
        raise ConfigError("--ep-overlap needs --ep and --pp above 1 and weights that are not gathered")
    if plan.ep_overlap and (plan.recompute == "full" or plan.schedule == "zero-bubble"):
        raise ConfigError("--ep-overlap goes with neither --recompute full nor --schedule zero-bubble")
    for name, usual in (("forward_prefetch", 0), ("backward_prefetch", 1)):
        depth = getattr(plan, name)
        check_count(name, depth, least=usual)
        if depth != usual and not (gathers_weights and plan.sharding == "fsdp2"):
            raise ConfigError(f"--{name.replace('_', '-')} needs --sharding fsdp2 over more than one rank")
    if plan.fsdp_overlap is not None and not gathers_weights:
        raise ConfigError("--fsdp-overlap needs --sharding fsdp2 or zero3 over more than one rank")
    if plan.recompute_modules and plan.recompute == "full":
        raise ConfigError("--recompute-modules has no effect with --recompute full")
    if "latent_up" in plan.recompute_modules and model.latent is None:
        raise ConfigError(f"--recompute-modules latent_up: {model.name} has no latent attention")
    if plan.mtp and not model.num_mtp_layers:
        raise ConfigError(f"--mtp has no effect: {model.name} has no layer for tokens further on")
    if not plan.low_precision and plan.fp8_weights:
        raise ConfigError("--fp8-weights needs --dtype fp8")
    if gathers_weights and not plan.dp_overlap:
        raise ConfigError(f"--no-dp-overlap has no effect with --sharding {plan.sharding}")
    if plan.shard_ranks * plan.replicas != plan.dp * plan.cp:
        raise ConfigError(f"--replicas {plan.replicas} must divide dp x cp = {plan.dp * plan.cp}")
    if plan.expert_tp_size is not None and plan.tp % plan.expert_tp_size:
        raise ConfigError(f"--expert-tp {plan.expert_tp_size} must divide --tp {plan.tp}")
    if plan.tp_overlap and (plan.tp == 1 or not plan.sequence_parallel):
        raise ConfigError("--tp-overlap needs --tp above 1 with sequence parallelism")


def _stages(plan: Plan, model: Model) -> None:
    if plan.pp == 1:
        if plan.vpp > 1:
            raise ConfigError(f"--vpp {plan.vpp} needs --pp above 1")
        return
    if plan.pp * plan.vpp > model.num_layers + 2:
        raise ConfigError(
            f"--pp {plan.pp} x --vpp {plan.vpp} is more than {model.num_layers} layers can fill"
        )
    split_layers(
        model.num_layers, plan.pp * plan.vpp, plan.first_stage_layers, plan.last_stage_layers, ends=2
    )
    if plan.vpp > 1 and plan.num_micro_batches % plan.pp:
        raise ConfigError(
            f"--vpp {plan.vpp} needs a number of micro-batches divisible by --pp {plan.pp}, "
            f"got {plan.num_micro_batches}"
        )


def check_count(name: str, count: int, maximum: int = MOST, least: int = 1) -> None:
    """Raise unless a whole number is usable as the option of that name."""
    if least <= count <= maximum:
        return
    got = str(count) if abs(count) < 10**18 else f"a number of {len(str(abs(count)))} digits"
    bound = f"at least {least}" if count < least else f"at most {maximum}"
    raise ConfigError(f"--{name.replace('_', '-')} must be {bound}, got {got}")


def layout_text(plan: Plan) -> str:
    """The plan on one line."""
    axes = " ".join(
        f"{axis}{getattr(plan, axis)}"
        for axis in ("dp", "tp", "pp", "vpp", "cp", "ep")
        if axis == "dp" or getattr(plan, axis) > 1
    )
    recompute = plan.recompute if plan.recompute_layers is None else f"{plan.recompute_layers} layers"
    flags = {
        "deepep": plan.deepep,
        "ep-overlap": plan.ep_overlap,
        "tp-overlap": plan.tp_overlap,
        "mtp": plan.mtp,
        plan.task: plan.task != "pretrain",
    }
    if plan.activation_offload:
        flags[f"offload {plan.activation_offload:g}"] = True
    extra = "".join(f" {name}" for name, is_set in flags.items() if is_set)
    if plan.recompute_modules:
        recompute = "+".join([*([recompute] if recompute != "none" else []), *plan.recompute_modules])
    return (
        f"{axes} mbs{plan.micro_batch_size} gbs{plan.global_batch_size} seq{plan.seq_len} {plan.dtype} "
        f"{plan.sharding} recompute {recompute} {plan.stack}{extra}"
    )


def split_layers(
    num_layers: int, num_stages: int, first: int | None = None, last: int | None = None, ends: int = 0
) -> list[int]:
    """Layers per stage in model order, as even as they go.

    first and last fix the end stages. ends: how many layers the embedding and the output layer stand for
    together when the numbers do not divide (they take a layer's place on the first and the last stage).
    Raises where first and last do not leave the other stages the layers that are left, one each or more.
    """
    return list(_counts(num_layers, num_stages, first, last, ends))


@lru_cache(maxsize=1024)
def _counts(
    num_layers: int, num_stages: int, first: int | None, last: int | None, ends: int
) -> tuple[int, ...]:
    _check_ends(num_layers, num_stages, first, last)
    fixed = [first, *([None] * (num_stages - 2)), last] if num_stages > 1 else [first]
    free = [i for i, layers in enumerate(fixed) if layers is None]
    left = num_layers - sum(layers for layers in fixed if layers is not None)
    counts = [layers or 0 for layers in fixed]
    if not free:
        return tuple(counts)
    pretend = left + (ends if first is None and last is None and left % len(free) else 0)
    base, extra = divmod(pretend, len(free))
    for number, stage in enumerate(free):
        counts[stage] = base + (1 if number < extra else 0)
    surplus = sum(counts) - num_layers
    for stage in (num_stages - 1, 0):
        if surplus > 0 and counts[stage] > 0:
            counts[stage] -= 1
            surplus -= 1
    return tuple(counts)


def _check_ends(num_layers: int, num_stages: int, first: int | None, last: int | None) -> None:
    ends = {"--first-stage-layers": first, "--last-stage-layers": last}
    fixed_ends = {name: layers for name, layers in ends.items() if layers is not None}
    for name, layers in fixed_ends.items():
        if layers < 0:
            raise ConfigError(f"{name} must be at least 0, got {layers}")
    free_stages = num_stages - len(fixed_ends)
    total = sum(fixed_ends.values())
    max_layers = num_layers - free_stages
    if not fixed_ends or total == max_layers or (free_stages and total < max_layers):
        return
    flags_text = " and ".join(f"{name} {layers}" for name, layers in fixed_ends.items())
    # The last end is the one to change, unless the first alone is too many.
    fits = [
        (name, max_layers - total + layers)
        for name, layers in fixed_ends.items()
        if max_layers - total + layers >= 0
    ]
    remedy = "fewer stages would work"
    if fits:
        name, layers = fits[-1]
        remedy = f"{name} {layers}{' or fewer' if free_stages else ''} would work"
    need = (
        f"leave one of {num_layers} layers for each other stage"
        if free_stages
        else f"hold all {num_layers} layers"
    )
    raise ConfigError(f"{flags_text} must {need} at --pp x --vpp = {num_stages}; {remedy}")
