"""What the collective library itself says of its calls, as it travels to what makes step records of it."""

from enum import IntEnum

import msgspec
import numpy as np

EVENT_DTYPE = np.dtype(
    [
        ("number", "u8"),
        ("launched_ns", "i8"),
        ("start", "u8"),
        ("end", "u8"),
        ("last_start", "u8"),
        ("first_end", "u8"),
        ("start_seen_ns", "i8"),
        ("end_seen_ns", "i8"),
        ("communicator", "u8"),
        ("plan", "u8"),
        ("sequence", "u8"),
        ("count", "u8"),
        ("peer", "i4"),
        ("num_ranks", "u4"),
        ("func", "u2"),
        ("datatype", "u2"),
        ("algorithm", "u2"),
        ("protocol", "u2"),
        ("num_channels", "u2"),
        ("num_started", "u2"),
        ("num_stopped", "u2"),
        ("timed_by", "u1"),
        ("flags", "u1"),
    ]
)
"""`Event` of aorta/device/native/collective_events.c: one collective, send or receive. Those of one kernel
have one plan. start and end are ticks of the device's timer or, without one, monotonic ns, by timed_by; times
in ns are monotonic. func, datatype, algorithm and protocol are indices of names, 0: none."""


class Flag(IntEnum):
    """Bits of an event's flags."""

    TO_ITSELF = 1
    """A send or receive of the rank's own: NCCL does not time it."""
    AFTER_ONE_TO_ITSELF = 2
    """Its communicator has had one: from then on some of its channels have times of earlier launches."""


class TimedBy(IntEnum):
    """Whose clock an event's start and end are of."""

    NOTHING = 0
    HOST = 1
    DEVICE = 2


class CollectiveChunk(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Events that have ended since the last chunk."""

    events: bytes
    """Rows of EVENT_DTYPE."""
    names: list[str]
    """Names that are new: they follow those of earlier chunks."""
    complete_ns: int
    """All that was launched before this monotonic time has come; 0: this chunk does not tell."""
    num_lost: int
    """Events that found the ring full, so far."""
