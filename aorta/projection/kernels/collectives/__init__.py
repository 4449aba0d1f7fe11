"""Time of a collective over the links of a node and the network between nodes."""

from aorta.projection.kernels.collectives.group import RankGroup, domain_size, rank_group
from aorta.projection.kernels.collectives.time import collective_time

__all__ = ["RankGroup", "collective_time", "domain_size", "rank_group"]
