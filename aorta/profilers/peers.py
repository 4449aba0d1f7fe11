"""Ranks that calibrate together.

Where the host of one rank is the bottleneck, the others wait for it, and only together do they show both
kinds of step (aorta.resolve.calibration). A handful of ranks shows that; ten thousand would exchange a lot.
"""

import torch.distributed as dist

from aorta.resolve.calibration import TracedStep

NUM_PEERS = 8
MOST_STEPS = 12
"""Of a rank, spread over the run."""


def peers_of(rank: int, world_size: int) -> range:
    first = rank - rank % NUM_PEERS
    return range(first, min(first + NUM_PEERS, world_size))


def some_of(traced: list[TracedStep]) -> list[TracedStep]:
    """At most MOST_STEPS, evenly spread."""
    if len(traced) <= MOST_STEPS:
        return traced
    return [traced[i * len(traced) // MOST_STEPS] for i in range(MOST_STEPS)]


def traced_by_peers(traced: list[TracedStep]) -> list[TracedStep]:
    """The steps of this rank and of its peers. A collective of all peers; those of others do not wait."""
    peers = list(peers_of(dist.get_rank(), dist.get_world_size()))
    group = None
    if len(peers) < dist.get_world_size():
        group = dist.new_group(peers, use_local_synchronization=True)
    gathered: list[list[TracedStep]] = [[] for _ in peers]
    dist.all_gather_object(gathered, some_of(traced), group=group)
    return [step for steps in gathered for step in steps]
