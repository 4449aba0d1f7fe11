"""Kernel records as they travel from the driver's side to what makes step records of them."""

from enum import IntEnum

import msgspec
import numpy as np

RECORD_DTYPE = np.dtype(
    [
        ("start", "i8"),
        ("end", "i8"),
        ("correlation", "u4"),
        ("stream", "u4"),
        ("name", "u4"),
        ("buffer", "u4"),
        ("device", "u2"),
        ("what", "u1"),
        ("in_graph", "u1"),
        ("unused", "u4"),
    ]
)
"""`Record` of aorta/device/native/kernel_records.c. Times are monotonic ns; correlation counts up with every
call of the driver, so it orders launches; name is an index, of a mark its number."""


class What(IntEnum):
    """Kinds of records."""

    KERNEL = 0
    COPY = 1
    SET = 2
    MARK = 3
    PEER_COPY = 4


class KernelChunk(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Records that have come since the last chunk."""

    records: bytes
    """Rows of RECORD_DTYPE."""
    names: list[str]
    """Names that are new: they follow those of earlier chunks."""
    settled: int
    """Every buffer with a lower number has come."""
    complete_ns: int
    """Every activity launched before this monotonic time has come; 0: this chunk does not tell."""
    num_lost: int
    """Records that found the ring full, so far."""
    lost_ns: tuple[int, int]
    """The stretch of time that they cover."""
    num_dropped: int
    """Records that the driver had no room for, so far."""
