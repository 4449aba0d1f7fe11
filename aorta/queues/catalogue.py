"""Workloads and words of the command line without torch, so that help and `list` do not wait for it.

The workloads' own files are where all of it is stated; scripts/queues_catalogue.py writes it down.
"""

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, get_args

import msgspec

Priority = Literal["P0", "P1", "P2", "P3"]
Size = Literal["small", "full"]
SyncMode = Literal["per_iteration", "end_only", "none"]

CATALOGUE = Path(__file__).with_name("catalogue.json")
PRIORITIES: tuple[Priority, ...] = get_args(Priority)
SYNC_MODES: tuple[SyncMode, ...] = get_args(SyncMode)
MAX_STREAMS = 64
PROBE_PARTS = ("queues", "switch", "effect")


def flag_of(name: str) -> str:
    """The command line's spelling of the field of that name."""
    return "--" + name.replace("_", "-")


class ListedOption(msgspec.Struct, frozen=True):
    """An option of a workload."""

    name: str
    notation: str
    """bytes, dims, groups; else bool, int, float, str, choice."""
    choices: tuple[str, ...]
    help: str

    @property
    def flag(self) -> str:
        return flag_of(self.name)


class ListedWorkload(msgspec.Struct, frozen=True):
    """A workload as `list` and `--help` show it."""

    name: str
    priority: Priority
    unit: str
    question: str
    stream_meaning: str
    min_streams: int
    max_streams: int
    options: tuple[ListedOption, ...]


@functools.cache
def catalogue() -> Mapping[str, ListedWorkload]:
    """Listed workloads by name, sorted as the registry sorts them."""
    listed = msgspec.json.decode(CATALOGUE.read_bytes(), type=list[ListedWorkload])
    return {workload.name: workload for workload in listed}
