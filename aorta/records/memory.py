"""rank_<n>_memory.json: what held a rank's memory when there was too little of it, or nearly."""

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Literal

import msgspec

from aorta.records.files import memory_name
from aorta.records.reader import read_beside
from aorta.records.writer import write_sealed

HeldKind = Literal[
    "parameters",
    "gradients",
    "optimizer state",
    "buffers",
    "activations",
    "kept graphs",
    "kept tensors",
    "tensors",
]
"""activations: what the backward pass of the step needs. kept graphs: what backward passes of earlier steps
would have needed, or those of several results that one container keeps. kept tensors: several in one
container of the program. tensors: all others."""


class HeldMemory(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Memory of one kind, of one place in the model or of one holder."""

    kind: HeldKind
    bytes: int
    num_blocks: int
    module: str = ""
    """Of the model, with * for the numbers of like layers; of an activation the module at or before it."""
    holder: str = ""
    """What keeps it: 'losses (train.py:31)', 'cache of Net (model.py:12)'. No contents."""


class MemoryShortage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a rank knows of its memory. Bytes that nobody told are None."""

    why: Literal["out of memory", "near the limit"]
    run_id: str | None = None
    attempt: int = 0
    global_step: int | None = None
    phase: str = ""
    place: str = ""
    """Line of the program that asked for memory: 'forward(), model.py:31'."""
    module: str = ""
    """In which that was, or to which the backward pass had come."""
    device: str
    asked_bytes: int | None = None
    limit_bytes: int | None = None
    """Of the device, or what the process may have of it."""
    allocated_bytes: int | None = None
    unused_bytes: int | None = None
    """Reserved by torch's allocator and not given out."""
    free_bytes: int | None = None
    """Of the device, by the driver."""
    held: list[HeldMemory] = []
    """The most first; together at most allocated_bytes."""
    is_whole: bool = True
    """False: not all objects were looked at, for want of time or since the program has frozen some."""
    expands_segments: bool | None = None


def write_shortage(folder: Path, rank: int, shortage: MemoryShortage) -> None:
    """Write the file anew. A full disk is no reason to end a program: then there is none."""
    with suppress(OSError):
        write_sealed(folder / memory_name(rank), shortage)


def read_shortages(
    folder: Path, ranks: Iterable[int], notes: list[str] | None = None
) -> dict[int, MemoryShortage]:
    """By rank; without those that have none, or a damaged one, which is added to notes."""
    found = ((rank, read_beside(folder / memory_name(rank), MemoryShortage, notes=notes)) for rank in ranks)
    return {rank: shortage for rank, shortage in found if shortage is not None}
