"""A model split over ranks by data, tensor and expert parallelism, and the gradients of what comes out.

make_meshes() makes the process groups, parallelize() gives a model on the meta device its parallel form, and
fill() puts values into its parameters; the training loop then asks for clip_grad_norm() once per step.

Whatever the form, a parameter's gradient is the mean over dp ranks of the gradients of their own losses.
Gradients and parameters may lie on different meshes: what holds for the whole model is computed across them.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import Placement
from torch.nn.parallel import DistributedDataParallel

from aorta.config.layout import Layout
from aorta.config.structs import CompileConfig, Config

log = logging.getLogger("aorta")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "tf32": torch.float32}
SplitPlan = Mapping[str, Literal["replicated_input", "colwise", "rowwise"]]


@dataclass(frozen=True)
class Meshes:
    """The world seen as dp x tp, and, where experts are spread over ranks, as expert_dp x ep x tp.

    Ranks of one tp group are neighbours, and so are the tp groups of one ep group.
    """

    dense: DeviceMesh
    expert: DeviceMesh | None

    @property
    def dp(self) -> DeviceMesh:
        return self.dense["dp"]

    @property
    def tp(self) -> DeviceMesh:
        return self.dense["tp"]


def make_meshes(layout: Layout, device_type: str) -> Meshes:
    """Meshes and their process groups. Collective: every rank calls it, in the same order."""
    dense = init_device_mesh(device_type, (layout.dp, layout.tp), mesh_dim_names=("dp", "tp"))
    expert = None
    if layout.ep > 1:
        axes = {"expert_dp": layout.expert_dp, "ep": layout.ep}
        if layout.tp > 1:
            axes["tp"] = layout.tp
        expert = init_device_mesh(device_type, tuple(axes.values()), mesh_dim_names=tuple(axes))
    return Meshes(dense, expert)


@dataclass(frozen=True)
class WrappedParts:
    """Modules of a model that parallelism treats apart."""

    blocks: Sequence[nn.Module]
    tensor_parallel: SplitPlan
    """Style of each split submodule, by its name within a block."""
    experts: Sequence[nn.Module] = ()
    """Modules whose parameters have one entry per expert in dim 0."""
    expert_dims: Mapping[str, int] = field(default_factory=dict)
    """The dim of each of their parameters that tensor parallelism splits."""


@dataclass
class ParallelModel:
    """The wrapped model and what its form asks of the training loop."""

    module: nn.Module
    """Module to call with a micro-batch."""
    plain: nn.Module
    """The model under the wrapper: the names of its parameters are the same in every form."""
    autocast_dtype: torch.dtype | None
    """Forms without FSDP keep fp32 parameters and gradients and cast in each operator."""
    device_type: str
    expert_group: dist.ProcessGroup | None = None
    expert_divisor: int = 1
    experts: list[nn.Module] = field(default_factory=list)

    @contextmanager
    def micro_batch(self, is_last: bool) -> Iterator[None]:
        """Context of a micro-batch's forward and backward; gradients are reduced in the last one only."""
        with self._gradient_sync(is_last):
            yield
        if is_last:
            self._reduce_replicated_experts()

    def autocast(self) -> AbstractContextManager[object]:
        if self.autocast_dtype is None:
            return nullcontext()
        return torch.autocast(self.device_type, self.autocast_dtype)

    def _gradient_sync(self, is_last: bool) -> AbstractContextManager[object]:
        if isinstance(self.module, FSDPModule):
            self.module.set_requires_gradient_sync(is_last)
            self.module.set_is_last_backward(is_last)
        elif isinstance(self.module, DistributedDataParallel) and not is_last:
            return self.module.no_sync()
        return nullcontext()

    def _reduce_replicated_experts(self) -> None:
        """Average the experts' gradients, which DDP leaves alone; they hold their ep group's sum already."""
        for module in self.experts:
            for parameter in module.parameters():
                gradient = parameter.grad
                assert isinstance(gradient, DTensor)
                local = gradient.to_local()
                if self.expert_group is not None:
                    dist.all_reduce(local, group=self.expert_group)
                local.div_(self.expert_divisor)


def parallelize(
    model: nn.Module,
    parts: WrappedParts,
    config: Config,
    layout: Layout,
    meshes: Meshes,
    device: torch.device,
    initialize: Callable[[nn.Module], None],
) -> ParallelModel:
    """Wrap the model, which lies on the meta device.

    initialize is called once the parameters have memory, before DDP copies rank 0's to the others.
    """
    # Tensor and expert parallelism split the parameters first: DDP and FSDP must see the parts. Compiled
    # forwards come before both, so that their hooks stay outside of the graphs.
    if layout.tp > 1:
        for block in parts.blocks:
            parallelize_module(block, meshes.tp, _tensor_parallel_styles(parts.tensor_parallel))
    for experts in parts.experts:
        _shard_experts(experts, parts.expert_dims, layout, meshes)
    if config.compile.enabled:
        _compile_blocks(parts.blocks, config.compile, device)
    dtype = DTYPES[config.training.precision]
    if config.parallel.mode == "fsdp":
        _fully_shard(model, parts, config, layout, meshes, dtype)
        model.to_empty(device=device)
        initialize(model)
        return ParallelModel(model, model, None, device.type)
    model.to_empty(device=device)
    initialize(model)
    return _replicate(model, parts, config, layout, meshes, device, dtype)


def _tensor_parallel_styles(plan: SplitPlan) -> dict[str, ParallelStyle]:
    make: dict[str, Callable[[], ParallelStyle]] = {
        "replicated_input": lambda: PrepareModuleInput(
            input_layouts=(Replicate(),), desired_input_layouts=(Replicate(),)
        ),
        "colwise": ColwiseParallel,
        "rowwise": RowwiseParallel,
    }
    return {name: make[style]() for name, style in plan.items()}


def _shard_experts(experts: nn.Module, dims: Mapping[str, int], layout: Layout, meshes: Meshes) -> None:
    """Give each rank of the ep axis its experts, and each rank of the tp axis its slice of every one."""
    if layout.ep == 1 and layout.tp == 1:
        return
    if meshes.expert is None:
        mesh = meshes.tp
    else:
        mesh = meshes.expert["ep", "tp"] if layout.tp > 1 else meshes.expert["ep"]
    for name, parameter in list(experts.named_parameters(recurse=False)):
        placements: list[Placement] = [Shard(0)] if layout.ep > 1 else []
        if layout.tp > 1:
            placements.append(Shard(dims[name]))
        sharded = distribute_tensor(parameter.detach(), mesh, placements)
        experts.register_parameter(name, nn.Parameter(sharded))


def _compile_blocks(blocks: Sequence[nn.Module], config: CompileConfig, device: torch.device) -> None:
    """Compile each block's forward; where the compiler does not work, say so once and leave them eager."""
    import torch._dynamo  # slow to import, needed here only

    def probe(x: Tensor) -> Tensor:
        return (x * 2).sin().sum()

    try:
        torch.compile(probe, backend=config.backend, mode=config.mode)(torch.ones(8, device=device))
    except Exception as error:  # whatever the compiler's own tools raise: the run goes on in eager mode
        reason = str(error).strip().splitlines() or [type(error).__name__]
        log.warning("compile.enabled: torch.compile does not work here, running eager: %s", reason[0])
        return
    # A block that fails to compile runs eagerly, with a warning that says why.
    torch._dynamo.config.suppress_errors = True
    # This would split graphs so that DDP's buckets start early; blocks are small, and it fails on them.
    torch._dynamo.config.optimize_ddp = False
    for block in blocks:
        block.forward = torch.compile(
            block.forward, backend=config.backend, mode=config.mode, dynamic=config.dynamic
        )


def _fully_shard(
    model: nn.Module, parts: WrappedParts, config: Config, layout: Layout, meshes: Meshes, dtype: torch.dtype
) -> None:
    parallel = config.parallel
    policy = MixedPrecisionPolicy()
    if dtype != torch.float32:
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=DTYPES[parallel.reduce_dtype])
    reshard = parallel.reshard_after_forward
    # From the inside out: a parameter belongs to the first wrapped module that holds it.
    if meshes.expert is not None:
        for experts in parts.experts:
            _fully_shard_experts(experts, meshes.expert["expert_dp"], layout, policy, reshard)
    for block in parts.blocks:
        fully_shard(block, mesh=meshes.dp, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(model, mesh=meshes.dp, mp_policy=policy, reshard_after_forward=reshard)
    blocks: list[FSDPModule] = [block for block in parts.blocks if isinstance(block, FSDPModule)]
    for i, fsdp_block in enumerate(blocks):
        next_blocks: list[FSDPModule] = blocks[i + 1 : i + 1 + parallel.forward_prefetch]
        if next_blocks:
            fsdp_block.set_modules_to_forward_prefetch(next_blocks)
        previous_blocks = blocks[max(0, i - parallel.backward_prefetch) : i][::-1]
        if previous_blocks and parallel.backward_prefetch > 1:  # 1 is what FSDP does by itself
            fsdp_block.set_modules_to_backward_prefetch(previous_blocks)


def _fully_shard_experts(
    experts: nn.Module, mesh: DeviceMesh, layout: Layout, policy: MixedPrecisionPolicy, reshard: bool
) -> None:
    """Shard over the ranks that hold the same experts: by expert if that is even, else by the next dim."""
    per_rank = next(experts.parameters()).shape[0] // layout.ep
    dim = 0 if per_rank % layout.expert_dp == 0 else 1
    fully_shard(
        experts,
        mesh=mesh,
        mp_policy=policy,
        reshard_after_forward=reshard,
        shard_placement_fn=lambda parameter: Shard(dim),
    )
    # all_to_all's backward has summed over the ep ranks; FSDP sums over the others: the mean divides by both.
    assert isinstance(experts, FSDPModule)
    experts.set_gradient_divide_factor(float(layout.dp))
    if mesh.device_type == "cpu" and layout.expert_dp > 1:  # with one rank FSDP would divide twice
        experts.set_force_sum_reduction_for_comms(True)  # gloo has no reduction that scales


def _replicate(
    model: nn.Module,
    parts: WrappedParts,
    config: Config,
    layout: Layout,
    meshes: Meshes,
    device: torch.device,
    dtype: torch.dtype,
) -> ParallelModel:
    parallel = config.parallel
    autocast_dtype = None if dtype == torch.float32 else dtype
    form = ParallelModel(model, model, autocast_dtype, device.type)
    if meshes.expert is not None:
        form.experts = list(parts.experts)
        form.expert_divisor = layout.dp
        form.expert_group = meshes.expert["expert_dp"].get_group() if layout.expert_dp > 1 else None
        # DDP must leave the experts alone: ranks of one ep group hold different ones.
        ignored = [name for name, p in model.named_parameters() if isinstance(p, DTensor)]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
    if layout.dp > 1:
        form.module = DistributedDataParallel(
            model,
            device_ids=None if device.type == "cpu" else [device.index],
            process_group=meshes.dp.get_group(),
            bucket_cap_mb=parallel.bucket_cap_mb,
            gradient_as_bucket_view=parallel.gradient_as_bucket_view,
            static_graph=parallel.static_graph,
            find_unused_parameters=parallel.find_unused_parameters,
        )
    return form


@torch.no_grad()
def fill(parameter: Tensor, value: Tensor) -> None:
    """Copy values that every rank has in full into a parameter: each keeps its part, nothing is sent."""
    if not isinstance(parameter, DTensor):
        parameter.copy_(value)
        return
    # FSDP's axis comes first in the mesh and splits what tp or ep has split before it.
    for axis in reversed(range(parameter.device_mesh.ndim)):
        dim = shard_dim(parameter.placements[axis])
        if dim is not None:
            value = _chunk(value, dim, parameter.device_mesh, axis)
    local = parameter.to_local()
    assert local.shape == value.shape, (local.shape, value.shape, parameter.placements)
    local.copy_(value)


def _chunk(value: Tensor, dim: int, mesh: DeviceMesh, axis: int) -> Tensor:
    """This rank's piece as torch.chunk cuts it; the last ranks may have none."""
    chunks = value.chunk(mesh.size(axis), dim)
    index = mesh.get_local_rank(axis)
    return chunks[index] if index < len(chunks) else value.narrow(dim, 0, 0)


def shard_dim(placement: Placement) -> int | None:
    """The tensor dim that an axis shards, None for a replicated one.

    Where FSDP shards what tp has sharded the placement has a dim, yet is no Shard to DTensor.
    """
    assert not placement.is_partial(), placement
    return None if placement.is_replicate() else placement.dim  # type: ignore[attr-defined]


def parameter_groups(
    parameters: Iterable[nn.Parameter], weight_decay: float
) -> list[dict[str, list[nn.Parameter] | float]]:
    """Groups for an optimizer: vectors have no decay, and one group has one mesh, as fused operators need."""
    groups: dict[tuple[bool, str], list[nn.Parameter]] = {}
    for parameter in parameters:
        key = (parameter.ndim > 1, mesh_key(parameter))
        groups.setdefault(key, []).append(parameter)
    return [
        {"params": members, "weight_decay": weight_decay if decays else 0.0}
        for (decays, _), members in groups.items()
    ]


def mesh_key(tensor: Tensor) -> str:
    """Text that is equal for tensors whose operators can be batched: on the same mesh, or on none."""
    return str(tensor.device_mesh) if isinstance(tensor, DTensor) else "local"


@torch.no_grad()
def clip_grad_norm(parameters: Iterable[Tensor], max_norm: float | None, unscale: float = 1.0) -> Tensor:
    """Scale the gradients so that their global norm is at most max_norm, and return the norm before.

    unscale multiplies the gradients first (fp16 loss scaling); the norm is that of the unscaled gradients.
    A norm that is not finite leaves inf or nan in the gradients.
    """
    parameters = list(parameters)
    norm = global_grad_norm(parameters) * unscale
    factor = torch.full_like(norm, unscale)
    if max_norm is not None:
        factor = factor * (max_norm / (norm + 1e-6)).clamp(max=1.0)
    local = [_local_and_groups(p.grad)[0] for p in parameters if p.grad is not None]
    if local and (max_norm is not None or unscale != 1.0):
        torch._foreach_mul_(local, factor)
    return norm


@torch.no_grad()
def global_grad_norm(parameters: Iterable[Tensor]) -> Tensor:
    """L2 norm over the whole model, every element once, as a scalar on their device; does not synchronise.

    Sharded gradients are summed over the axes that shard them, replicated ones are counted once.
    Sums in float32. Every rank calls it, with its parameters in the same order.
    """
    by_axes: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            local, groups = _local_and_groups(parameter.grad)
            by_axes.setdefault(groups, []).append(local)
    if not by_axes:
        return torch.zeros(())
    total: Tensor | None = None
    for groups, gradients in by_axes.items():
        norms = torch._foreach_norm(gradients, 2.0, dtype=torch.float32)
        square = torch.stack(list(norms)).square().sum()
        for group in groups:
            dist.all_reduce(square, group=group)
        total = square if total is None else total + square
    assert total is not None
    return total.sqrt()


def _local_and_groups(gradient: Tensor) -> tuple[Tensor, tuple[dist.ProcessGroup, ...]]:
    """This rank's part, and the groups over which the parts make the whole."""
    if not isinstance(gradient, DTensor):
        return gradient, ()
    mesh = gradient.device_mesh
    groups = tuple(
        mesh.get_group(axis)
        for axis, placement in enumerate(gradient.placements)
        if shard_dim(placement) is not None and mesh.size(axis) > 1
    )
    return gradient.to_local(), groups
