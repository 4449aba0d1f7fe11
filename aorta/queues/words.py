"""Words of the command line and of results, which need no torch."""

from typing import Literal, get_args

Category = Literal["latency_sensitive", "distributed", "inference", "pipeline"]
Priority = Literal["P0", "P1", "P2", "P3"]
Size = Literal["small", "full"]
SyncMode = Literal["per_iteration", "end_only", "none"]

CATEGORIES: tuple[Category, ...] = get_args(Category)
PRIORITIES: tuple[Priority, ...] = get_args(Priority)
SYNC_MODES: tuple[SyncMode, ...] = get_args(SyncMode)
MAX_STREAMS = 64

PROBE_PARTS = ("queues", "chains", "effect", "inversion")


def flag_of(name: str) -> str:
    """The command line's spelling of the field of that name."""
    return "--" + name.replace("_", "-")
