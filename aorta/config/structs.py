"""Every setting, its type and its default. A YAML file holds only what differs from these."""

import re
from typing import Annotated, Literal

import msgspec

from aorta.errors import ConfigError

PositiveInt = Annotated[int, msgspec.Meta(ge=1)]
Count = Annotated[int, msgspec.Meta(ge=0)]
PositiveFloat = Annotated[float, msgspec.Meta(gt=0)]
NonNegativeFloat = Annotated[float, msgspec.Meta(ge=0)]
DeviceChoice = Literal["auto", "cpu", "cuda"]
Fraction = Annotated[float, msgspec.Meta(ge=0, lt=1)]


class TrainingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    max_steps: PositiveInt | None = None
    """Optimizer steps of the whole run; null: as many as the epochs hold."""

    epochs: PositiveInt = 1
    """Passes over data.steps_per_epoch steps; ends the run where max_steps is null."""

    batch_size: PositiveInt = 4
    """Sequences per data-parallel rank and micro-batch."""

    grad_accum_steps: PositiveInt = 1
    """Micro-batches per optimizer step; gradients are reduced on the last one only."""

    precision: Literal["bf16", "fp16", "fp32", "tf32"] = "bf16"
    """Arithmetic of the matrix multiplies; the parameters stay fp32. fp16 scales the loss."""

    grad_clip_norm: PositiveFloat | None = 1.0
    """Largest global gradient norm; null: no clipping and no norm in the records."""

    log_interval: PositiveInt = 10
    """Steps between two progress lines when stdout is not a terminal."""

    output_dir: str = "artifacts"
    """Where records, traces, TensorBoard files and checkpoints go."""

    seed: Count = 0
    """Decides the initial parameters and the data, whatever the parallel layout."""

    deterministic: bool = False
    """Deterministic algorithms only: slower, and a CUDA run repeats bit for bit."""

    device: DeviceChoice = "auto"
    """auto: a GPU for every rank of the machine (CUDA or ROCm), or the CPU for all of them."""

    activation_checkpointing: bool = False
    """Keep only each block's input and compute the rest again in backward."""

    checkpoint_every: Count = 0
    """Steps between two checkpoints; 0: none during the run."""

    checkpoint_at_end: bool = False
    """Write one at the run's last step too, also when a signal ended it."""

    checkpoint_dir: str | None = None
    """Where checkpoints go, on a file system that all ranks see; null: output_dir/checkpoints."""

    resume: str | None = None
    """A checkpoint to continue from, or 'latest' in checkpoint_dir (none there: start afresh)."""


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    hidden: PositiveInt = 64
    """Model width."""

    ffn: PositiveInt = 176
    """Width of the feed-forward layer, of each expert in a mixture."""

    num_heads: PositiveInt = 4
    """Query heads; each is hidden / num_heads wide."""

    num_kv_heads: PositiveInt = 2
    """Key and value heads, shared by groups of query heads."""

    num_layers: PositiveInt = 2
    """Decoder blocks."""

    vocab_size: PositiveInt = 256
    """Different tokens."""

    num_experts: Count = 0
    """Experts per block; 0: dense feed-forward layers."""

    num_active_experts: PositiveInt = 2
    """Experts that each token visits."""

    capacity_factor: PositiveFloat | None = None
    """Slots per expert as a multiple of an even share: tokens over it are dropped, nothing synchronises.
    null: dropless; the host then reads the counts in every MoE layer."""

    aux_loss_weight: NonNegativeFloat = 0.01
    """Weight of the load-balancing loss, summed over layers."""

    rope_theta: PositiveFloat = 10000.0
    """Base of the rotary position frequencies."""

    norm_eps: PositiveFloat = 1e-5
    """Added to the mean square in RMSNorm."""


class DataConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    seq_len: PositiveInt = 64
    """Tokens that a sequence predicts."""

    steps_per_epoch: PositiveInt = 100
    """Optimizer steps in an epoch of the synthetic data."""

    prefetch: bool = True
    """Copy the next micro-batch to the GPU on a stream of its own while this one computes."""


class ParallelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    mode: Literal["ddp", "fsdp"] = "fsdp"
    """How the dp axis keeps replicas equal: DistributedDataParallel or fully_shard (FSDP2)."""

    dp: Count | None = None
    """Data-parallel ranks; null or 0: whatever the world leaves."""

    tp: Count = 1
    """Tensor-parallel ranks; 0: whatever the world leaves."""

    ep: PositiveInt = 1
    """Expert-parallel ranks, a part of the dp axis; with tp each expert is split over the tp axis too."""

    reshard_after_forward: bool = True
    """fsdp: free a block's gathered parameters after forward and gather them again in backward."""

    forward_prefetch: Count = 0
    """fsdp: blocks whose all-gather starts before this block computes; 0: only as the host gets there."""

    backward_prefetch: PositiveInt = 1
    """fsdp: blocks gathered ahead in backward; 1 is FSDP's own default."""

    reduce_dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    """fsdp: type in which gradients are reduced (unused in fp32 and tf32 runs)."""

    bucket_cap_mb: PositiveFloat = 25.0
    """ddp: size of a gradient bucket in MiB."""

    gradient_as_bucket_view: bool = True
    """ddp: gradients live in the buckets, which saves a copy."""

    static_graph: bool = False
    """ddp: the graph is the same in every iteration."""

    find_unused_parameters: bool = False
    """ddp: look for parameters without gradient in every iteration."""


class OptimizerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    lr: PositiveFloat = 3e-3
    """Learning rate of AdamW after warm-up."""

    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    """Decay of the first and second moment."""

    weight_decay: NonNegativeFloat = 0.1
    """Decoupled decay of matrices; vectors have none."""

    eps: PositiveFloat = 1e-8
    """Added to the denominator."""

    fused: bool | None = None
    """One kernel for all parameters; null: on GPUs."""


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    kind: Literal["constant", "cosine", "linear"] = "constant"
    """The learning rate after warm-up: constant, or down to min_lr_ratio at the last step."""

    warmup_steps: Count = 5
    """Steps of linear rise to optimizer.lr."""

    min_lr_ratio: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.1
    """The last step's learning rate as a part of optimizer.lr (cosine, linear)."""


class CompileConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    enabled: bool = False
    """torch.compile each block; where that fails the run goes on without and says why."""

    backend: str = "inductor"
    """As in torch.compile."""

    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = "default"
    """As in torch.compile."""

    dynamic: bool | None = None
    """As in torch.compile; null: decided by recompilation."""


class ProfilingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    enabled: bool = False
    """Run torch.profiler on the window of steps that wait, warmup, active and repeat describe."""

    wait: Count = 5
    """Steps before a window that are not profiled."""

    warmup: Count = 2
    """Steps that are profiled and thrown away."""

    active: PositiveInt = 3
    """Steps that are kept."""

    repeat: Count = 1
    """Number of windows; 0: until the end of the run."""

    record_shapes: bool = True
    """Keep the operators' input shapes."""

    profile_memory: bool = True
    """Keep allocations and frees."""

    with_stack: bool = False
    """Keep Python stacks (expensive)."""

    with_flops: bool = False
    """Estimate operator FLOPs."""

    tensorboard: bool = True
    """Write traces in the layout of the TensorBoard profiler plugin."""

    chrome_trace: bool | None = None
    """Write a Chrome trace file; null: yes, but not on ROCm, where the export has crashed runs."""

    trace_filename: str = "trace.json"
    """Name of that file within the rank's folder: *.json or *.json.gz, which readers look for."""

    export: Literal["auto", "inline", "child"] = "auto"
    """Who writes traces. child: a forked copy of the process, so that a crash costs the trace and not the
    run; it cannot ask CUDA for the device's properties. auto: child on ROCm, inline elsewhere."""

    export_timeout_s: PositiveFloat = 300.0
    """After this long a child that writes a trace is ended and the trace is lost."""

    sync_events: bool = False
    """Record stream and event synchronisation (CUDA)."""

    ranges: bool = False
    """NVTX (ROCTx) ranges of steps, forward, backward and optimizer, for nsys and rocprofv3."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[^/\\\0]+\.json(\.gz)?", self.trace_filename):
            raise ConfigError(
                "profiling.trace_filename must be a file name without a folder that ends in .json or "
                f".json.gz, got {self.trace_filename!r}"
            )


class HangConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    enabled: bool = True
    """A watchdog thread on every rank, which reports where the rank stands once no step ends."""

    timeout_s: PositiveFloat = 300.0
    """Time without a step after which the ranks report; below distributed.timeout_s, which ends the run."""

    start_timeout_s: PositiveFloat | None = None
    """The same for the first step, which may compile; null: timeout_s, with compile.enabled at least 900."""

    checkpoint_timeout_s: PositiveFloat = 900.0
    """The same while a checkpoint is written."""

    pause_timeout_s: PositiveFloat = 1800.0
    """The same in a pause that a rank has announced: recorder.pausing("validation")."""

    median_factor: Annotated[float, msgspec.Meta(gt=1)] | None = None
    """Report after this many times the median step already (at least 10 s, with 10 steps behind); null:
    after timeout_s alone."""

    action: Literal["report", "abort"] = "report"
    """report: write output_dir/hang and go on waiting. abort: then end the process."""


class RecordingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    placement: Literal["dedicated", "native"] = "dedicated"
    """dedicated: synchronous collectives run on named streams of their own. native: nothing is moved."""

    overhead: str = "1%"
    """What recording may cost of the step time. off: record every step, as dedicated placement does, which
    moves collectives. Steps that a profiler traces are always recorded."""

    kernels: Literal["auto", "on", "off"] = "auto"
    """auto: time steps by the driver's kernel records where they can be had (CUDA), else by events. on: fail
    where they cannot. off: by events, to compare vendors by one method."""

    telemetry_interval_s: PositiveFloat = 1.0
    """Seconds between two samples of the device's power, clocks and temperature."""


class LoggingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    tensorboard: bool = True
    """Scalars of rank 0 in output_dir/tensorboard."""

    progress: bool = True
    """A progress line on rank 0."""


class DistributedConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    backend: Literal["auto", "nccl", "gloo"] = "auto"
    """auto: nccl on GPUs (RCCL on ROCm), gloo on the CPU."""

    timeout_s: PositiveFloat = 600.0
    """After this long in one collective the run fails."""


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    training: TrainingConfig = TrainingConfig()
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    parallel: ParallelConfig = ParallelConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    compile: CompileConfig = CompileConfig()
    profiling: ProfilingConfig = ProfilingConfig()
    recording: RecordingConfig = RecordingConfig()
    logging: LoggingConfig = LoggingConfig()
    distributed: DistributedConfig = DistributedConfig()
    hang: HangConfig = HangConfig()
