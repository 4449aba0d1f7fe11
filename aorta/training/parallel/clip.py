"""The norm of a gradient whose parts live on different meshes."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from aorta.training.parallel.shards import shard_dim


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
