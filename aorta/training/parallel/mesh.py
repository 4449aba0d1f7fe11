"""Device meshes. Ranks of one tp group are neighbours, and so are those of one ep group."""

from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from aorta.config import Layout


@dataclass(frozen=True)
class Meshes:
    """The world seen as dp x tp, and, where experts are sharded or copied apart, as expert_dp x ep."""

    dense: DeviceMesh
    expert: DeviceMesh | None

    @property
    def dp(self) -> DeviceMesh:
        return self.dense["dp"]

    @property
    def tp(self) -> DeviceMesh:
        return self.dense["tp"]


def make_meshes(layout: Layout, device_type: str) -> Meshes:
    """Creates the process groups: every rank calls it, in the same order."""
    dense = init_device_mesh(device_type, (layout.dp, layout.tp), mesh_dim_names=("dp", "tp"))
    expert = None
    if layout.ep > 1:  # tp is 1 then
        expert = init_device_mesh(
            device_type, (layout.expert_dp, layout.ep), mesh_dim_names=("expert_dp", "ep")
        )
    return Meshes(dense, expert)
