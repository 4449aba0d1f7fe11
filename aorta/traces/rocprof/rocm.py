"""What the formats of rocprofv3 have in common."""

from collections.abc import Sequence
from typing import TypedDict

import numpy as np
from numpy.typing import NDArray

from aorta.errors import TraceError
from aorta.traces.assemble import UNLINKED, Activities, indexed
from aorta.traces.host_calls import CollectiveCalls
from aorta.traces.names import rank_in_name

BOOT_CLOCK = "times are those of the machine's boot clock, not of the Unix clock"
STEPS_UNLINKED = "steps are marked, but without --hip-trace nothing ties kernels to them: they are left out"


class Place(TypedDict):
    rank: int
    world_size: int | None


def finish(work: Activities, calls: CollectiveCalls, location: str, rank: int | None) -> Place:
    """The rank by the best evidence: the communicator's, the file's name, what the caller assumed.

    Leaves out, and says so: activities without times; steps where no host call links work to them.
    """
    _drop_without_time(work)
    if work.marks and not (work.launch_ns != UNLINKED).any():
        work.marks = []
        work.notes.append(STEPS_UNLINKED)
    for candidate in (calls.rank, rank_in_name(location), rank):
        if candidate is not None:
            return Place(rank=candidate, world_size=calls.num_ranks)
    work.notes.append("the trace does not say its rank: 0 is assumed")
    return Place(rank=0, world_size=calls.num_ranks)


def stream_labels(
    device: Sequence[object], stream: Sequence[object], otherwise: Sequence[str]
) -> tuple[tuple[str, ...], NDArray[np.int32]]:
    """'7', or '2:7' (device:stream) where there are several devices; otherwise where no stream is known."""
    labels = [fallback if s is None else str(s) for s, fallback in zip(stream, otherwise, strict=True)]
    if len(set(device)) > 1:
        labels = [f"{d}:{label}" for d, label in zip(device, labels, strict=True)]
    return indexed(labels)


def dispatch_gaps(numbers: Sequence[int], location: str) -> int:
    """How many numbers the sequence of dispatches lacks."""
    try:
        unique = np.unique(np.array([number for number in numbers if number > 0], dtype=np.int64))
    except OverflowError as error:
        raise TraceError(f"{location} has dispatch numbers that no tool writes: {error}") from error
    return int(unique[-1] - unique[0]) + 1 - len(unique) if len(unique) else 0


def _drop_without_time(work: Activities) -> None:
    keep = (work.start_ns > 0) & (work.end_ns > 0)
    work.num_without_time += int(np.count_nonzero(~keep))
    work.keep(keep)
