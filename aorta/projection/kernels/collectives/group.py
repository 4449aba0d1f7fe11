"""Placement of a group's ranks in the links' domains."""

import msgspec

from aorta.errors import ProjectionError
from aorta.hardware import Hardware


class RankGroup(msgspec.Struct, frozen=True):
    """num_ranks ranks, ranks_per_domain of them in each scale-up domain (node, or NVL72 rack)."""

    num_ranks: int
    ranks_per_domain: int

    def __post_init__(self) -> None:
        if not 1 <= self.ranks_per_domain <= self.num_ranks:
            raise ProjectionError(
                f"a group of {self.num_ranks} ranks cannot have {self.ranks_per_domain} in one domain"
            )
        if self.num_domains * self.ranks_per_domain != self.num_ranks:
            raise ProjectionError(
                f"{self.num_ranks} ranks do not fill domains of {self.ranks_per_domain} evenly"
            )

    @property
    def num_domains(self) -> int:
        """Domains that the group spans."""
        return self.num_ranks // self.ranks_per_domain


def domain_size(hardware: Hardware, gpus_per_node: int | None = None) -> int:
    """GPUs of one scale-up domain on nodes of gpus_per_node; None: the node of the hardware file.

    A node bounds the domain, but where links reach beyond the file's node, as in an NVL72. More GPUs in a
    node than the links join are several domains.
    """
    up, out = hardware.scale_up, hardware.scale_out
    if gpus_per_node is None or up.domain_size > out.gpus_per_node:
        return up.domain_size
    return min(up.domain_size, gpus_per_node)


def rank_group(
    num_ranks: int, hardware: Hardware, stride: int = 1, gpus_per_node: int | None = None
) -> RankGroup:
    """The group of ranks 0, stride, 2 stride, ... when ranks fill the domains in order.

    A data-parallel group beside tp = 8 has stride 8: on nodes of 8 every member is on another node.
    """
    if num_ranks < 1 or stride < 1:
        raise ProjectionError(f"a group needs ranks and a stride of at least 1, got {num_ranks} and {stride}")
    inside = min(num_ranks, max(1, domain_size(hardware, gpus_per_node) // stride))
    while num_ranks % inside:  # a domain that the group does not fill evenly: the even part decides
        inside -= 1
    return RankGroup(num_ranks, inside)
