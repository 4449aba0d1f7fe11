"""Parameters that this rank holds a part of."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement


@torch.no_grad()
def fill(parameter: Tensor, value: Tensor) -> None:
    """Give a parameter the values that every rank knows in full; each keeps its part, nothing is sent."""
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


def shard_dim(placement: Placement) -> int | None:
    """The tensor dim that an axis shards. Also where FSDP shards what tp has: that is no Shard to DTensor."""
    assert not placement.is_partial(), placement
    return None if placement.is_replicate() else placement.dim  # type: ignore[attr-defined]


def _chunk(value: Tensor, dim: int, mesh: DeviceMesh, axis: int) -> Tensor:
    """This rank's piece as torch.chunk cuts it; the last ranks may have none."""
    chunks = value.chunk(mesh.size(axis), dim)
    index = mesh.get_local_rank(axis)
    return chunks[index] if index < len(chunks) else value.narrow(dim, 0, 0)


def parameter_groups(
    parameters: Iterable[nn.Parameter], weight_decay: float
) -> list[dict[str, list[nn.Parameter] | float]]:
    """Groups for an optimizer: vectors without decay; and one mesh each, as its fused operators need."""
    groups: dict[tuple[bool, str], list[nn.Parameter]] = {}
    for parameter in parameters:
        key = (parameter.ndim > 1, mesh_key(parameter))
        groups.setdefault(key, []).append(parameter)
    return [
        {"params": members, "weight_decay": weight_decay if decays else 0.0}
        for (decays, _), members in groups.items()
    ]


def mesh_key(tensor: Tensor) -> str:
    """Equal for tensors whose operators can be batched: the same mesh, or none."""
    return str(tensor.device_mesh) if isinstance(tensor, DTensor) else "local"
