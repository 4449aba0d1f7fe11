"""Ranks that calibrate together.

Where the host of one rank is the bottleneck, the others wait for it, and only together do they show both
kinds of step (aorta.steps.calibration). A handful of ranks shows that; ten thousand would exchange a lot.

They exchange through the job's store and not by a collective: training is over then, nobody watches for hangs
any more, and a rank that is late or gone must cost the others a while and not their run.
"""

import logging
import pickle
import time
import zlib
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store

from aorta.steps.calibration import TracedStep

log = logging.getLogger(__name__)

NUM_PEERS = 8
MOST_STEPS = 12
"""Of a rank, spread over the run."""
FEW_STEPS, MANY_RANKS = 3, 64
"""In larger jobs, whose store serves all ranks at once."""
MOST_RANKS = 1024
"""In still larger jobs each rank calibrates by its own steps."""
PATIENCE_S = 120.0
"""With peers that still read their traces, and then with those that have not fetched what they need."""


def peers_of(rank: int, world_size: int) -> range:
    first = rank - rank % NUM_PEERS
    return range(first, min(first + NUM_PEERS, world_size))


def some_of(traced: list[TracedStep], world_size: int = 1) -> list[TracedStep]:
    """At most as many as a job of this size exchanges, evenly spread."""
    max_steps = MOST_STEPS if world_size <= MANY_RANKS else FEW_STEPS
    if len(traced) <= max_steps:
        return traced
    return [traced[i * len(traced) // max_steps] for i in range(max_steps)]


class Peers:
    """The ranks that calibrate with this one."""

    def __init__(self, store: Store, rank: int, world_size: int, patience_s: float = PATIENCE_S) -> None:
        self._store = PrefixStore("aorta/traced", store)
        self._rank = rank
        self._world_size = world_size
        self._patience_s = patience_s

    def traced_with(self, traced: list[TracedStep]) -> list[TracedStep]:
        """The steps of this rank and of its peers; of those that are late or gone none.

        Every rank of the job calls it once. Rank 0, which may serve the store, leaves when all have what they
        need or its patience ends.
        """
        shared_steps = some_of(traced, self._world_size)
        if self._world_size > MOST_RANKS:
            return shared_steps
        until_s = time.monotonic() + self._patience_s
        gathered: list[TracedStep] = []
        try:
            self._store.set(str(self._rank), zlib.compress(pickle.dumps(shared_steps), 1))  # type: ignore[arg-type]
            for peer in peers_of(self._rank, self._world_size):
                gathered += shared_steps if peer == self._rank else self._steps_of(peer, until_s)
            self._leave()
        except RuntimeError as error:  # the store is gone
            log.warning("rank %d: calibrated by fewer ranks than it could be: %s", self._rank, error)
        return gathered or shared_steps

    def _steps_of(self, peer: int, until_s: float) -> list[TracedStep]:
        left_s = max(0.1, until_s - time.monotonic())
        try:
            self._store.wait([str(peer)], timedelta(seconds=left_s))
        except RuntimeError:  # timed out, by its name in this version of torch
            log.warning("rank %d: rank %d has not given its traced steps", self._rank, peer)
            return []
        steps: list[TracedStep] = pickle.loads(zlib.decompress(self._store.get(str(peer))))
        return steps

    def _leave(self) -> None:
        num_done = self._store.add("done", 1)
        until_s = time.monotonic() + self._patience_s
        while self._rank == 0 and num_done < self._world_size and time.monotonic() < until_s:
            time.sleep(0.02)
            num_done = self._store.add("done", 0)
