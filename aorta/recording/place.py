"""Makes room for a run's records: a finished run's files are moved aside, never overwritten."""

import itertools
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from aorta.errors import RecordError
from aorta.records.writer import RUN_FILES, move_aside, steps_name

_STEPS = "rank_*_metrics.jsonl"
"""The one pattern of RUN_FILES that every rank has a file of."""
_MOVED = "moved"
_claims = itertools.count()


def claim_folder(output_dir: Path, rank: int, world_size: int) -> None:
    """Move what an earlier run left aside. Ranks of one run never move each other's files.

    With a process group rank 0 moves everything and the others wait for its word in the store
    (no collective), which may be its error. Without one, each rank moves its own file, and rank 0
    what no rank of this run will write.
    """
    if dist.is_available() and dist.is_initialized() and world_size > 1 and dist.get_backend() != "fake":
        store = dist.distributed_c10d._get_default_store()
        key = f"aorta/folder/{next(_claims)}"
        if rank == 0:
            try:
                move_aside(output_dir)
            except RecordError as error:
                store.set(key, str(error))
                raise
            store.set(key, _MOVED)
        else:
            store.wait([key], timedelta(minutes=5))
            word = store.get(key).decode()
            if word != _MOVED:
                raise RecordError(word)
            # Where the folder is not rank 0's (another node, a path of its own), the old file remains.
            move_aside(output_dir, (steps_name(rank),))
        return
    mine = [steps_name(rank)]
    if rank == 0:
        mine += [pattern for pattern in RUN_FILES if pattern != _STEPS]
        known = {steps_name(other) for other in range(world_size)}
        mine += [p.name for p in output_dir.glob(_STEPS) if p.name not in known]
    move_aside(output_dir, tuple(mine))
