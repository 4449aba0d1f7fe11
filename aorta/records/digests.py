"""node_<n>_digest.bin: the newest numbers of the ranks of one node, for whoever watches many ranks.

A slot of a fixed size per rank, written in place about once a second by the process that writes the rank's
lines. To look at ten thousand ranks is to read a thousand small files, and no lines.
"""

import math
import os
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean, median

import numpy as np
from numpy.typing import NDArray

from aorta.files import read_regular, regular_descriptor
from aorta.launcher import local_rank
from aorta.records.files import DIGEST_FILE, digest_name
from aorta.records.schema import StepRecord

WINDOW_STEPS = 20
"""The newest steps whose lengths a slot tells."""
WINDOW_RECORDED = 12
WINDOW_S = 10.0
"""The newest recorded steps that its other numbers are of, and the time within which these have to end: a
block of 8 is most of them, so that what has just begun shows."""
SLOT_BYTES = 192
MOST_BYTES = SLOT_BYTES << 14
"""Of one file."""
MOST_RANKS = 1 << 20
_MAGIC = 0x1D_A0_27_01
PARTS = ("compute_ms", "exposed_ms", "idle_ms", "comm_ms", "hidden_ms")
"""Means over the recorded steps."""
_NUMBERS = (
    "step_ms", "median_step_ms", "recorded_step_ms", *PARTS, "median_exposed_ms", "loss", "used_bytes",
    "sm_clock_mhz", "power_w",
)  # fmt: skip
_SEALED_FROM = 8
SLOT = np.dtype(
    [("magic", "<u4"), ("crc32", "<u4"), ("run", "<u8")]
    + [(name, "<i4") for name in ("attempt", "rank", "world_size", "num_shown", "num_recorded", "is_closed")]
    + [(name, "<i8") for name in ("global_step", "num_steps", "end_unix_ns")]
    + [(name, "<f8") for name in _NUMBERS]
    + [("unused", "V24")]
)
"""num_shown, num_recorded: steps that the numbers are of. NaN: not measured. num_steps: of the attempt."""
Slots = NDArray[np.void]


class Digest:
    """The slot of one rank. Never raises OSError."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._descriptor: int | None = None
        self._has_failed = False
        self._offset = 0
        self._num_steps = self._global_step = self._end_unix_ns = 0
        self._lengths_ms: deque[float] = deque(maxlen=WINDOW_STEPS)
        self._recorded: deque[StepRecord] = deque(maxlen=WINDOW_RECORDED)

    def add(self, record: StepRecord) -> None:
        """Take what a step tells beside its length, which add_lengths takes."""
        if self._num_steps == 1:  # the first step holds the program's start
            self._lengths_ms.clear()
            self._recorded.clear()
        if record.is_recorded:
            self._recorded.append(record)

    def add_lengths(self, last_step: int, lengths_ms: Sequence[float], end_unix_ns: int) -> None:
        """Take steps in a row, recorded or not. end_unix_ns: of the last one."""
        self._num_steps += len(lengths_ms)
        self._lengths_ms.extend(lengths_ms[-WINDOW_STEPS:])
        self._global_step, self._end_unix_ns = last_step, end_unix_ns

    def write(self, is_closed: bool = False) -> None:
        if not self._recorded or self._has_failed:
            return
        try:
            if self._descriptor is None:
                self._open(self._recorded[-1].rank)
            assert self._descriptor is not None
            os.pwrite(self._descriptor, self._slot(is_closed), self._offset)
        except OSError:
            self._has_failed = True

    def close(self) -> None:
        self.write(is_closed=True)
        if self._descriptor is not None:
            with suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = None

    def _open(self, rank: int) -> None:
        local = min(local_rank(rank), rank)
        self._offset = SLOT_BYTES * local
        path = self._folder / digest_name(rank - local)
        self._descriptor = regular_descriptor(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW)

    def _slot(self, is_closed: bool) -> bytes:
        last = self._recorded[-1]
        recorded = [
            record for record in self._recorded if last.end_unix_ns - record.end_unix_ns <= WINDOW_S * 1e9
        ]
        exposed_ms = [record.overlap.exposed_ms for record in recorded]
        memory, device = last.memory, last.device
        numbers = (
            _of(fmean, self._lengths_ms),
            _of(median, self._lengths_ms),
            _of(fmean, [record.step_ms for record in recorded]),
            *(_of(fmean, [getattr(record.overlap, name) for record in recorded]) for name in PARTS),
            _of(median, exposed_ms),
            last.loss,
            None if memory is None else memory.reserved_bytes,
            None if device is None else device.sm_clock_mhz,
            None if device is None else device.power_w,
        )
        return packed_slot(
            (run_number(last.run_id), last.attempt, last.rank, last.world_size, len(self._lengths_ms),
             len(recorded), int(is_closed), self._global_step, self._num_steps, self._end_unix_ns),
            [math.nan if number is None else number for number in numbers],
        )  # fmt: skip


def packed_slot(who: Sequence[int], numbers: Iterable[float]) -> bytes:
    """A slot with its checksum: who from `run` on, and the numbers, in the order of SLOT."""
    data = np.array([(_MAGIC, 0, *who, *numbers, b"")], SLOT).tobytes()
    return b"%b%b%b" % (data[:4], zlib.crc32(data[_SEALED_FROM:]).to_bytes(4, "little"), data[_SEALED_FROM:])


def run_number(run_id: str | None) -> int:
    return 0 if run_id is None else zlib.crc32(run_id.encode())


def read_digests(folder: Path) -> Slots:
    """The slots of the newest attempt, in order of ranks; those that are torn or damaged are left out."""
    parts: list[Slots] = []
    try:
        names = [name for entry in os.scandir(folder) if (name := DIGEST_FILE.fullmatch(entry.name))]
    except OSError:
        names = []
    num_left = MOST_RANKS
    for name in names:
        with suppress(OSError):
            parts.append(_slots_of(read_regular(folder / name[0], MOST_BYTES), int(name[1]))[:num_left])
            num_left -= len(parts[-1])
    slots = np.concatenate(parts) if parts else np.zeros(0, SLOT)
    if not len(slots):
        return slots
    latest = slots[np.argmax(slots["end_unix_ns"])]
    slots = slots[(slots["run"] == latest["run"]) & (slots["attempt"] == latest["attempt"])]
    ordered: Slots = slots[np.argsort(slots["rank"], kind="stable")]
    return ordered


def _slots_of(data: bytes, first_rank: int) -> Slots:
    slots: Slots = np.frombuffer(data.ljust(-(-len(data) // SLOT_BYTES) * SLOT_BYTES, b"\0"), SLOT)
    is_whole = [
        zlib.crc32(data[place * SLOT_BYTES + _SEALED_FROM : (place + 1) * SLOT_BYTES]) == crc32
        for place, crc32 in enumerate(slots["crc32"].tolist())
    ]
    is_own = (slots["magic"] == _MAGIC) & (slots["rank"] == first_rank + np.arange(len(slots)))
    is_own &= (slots["rank"] < slots["world_size"]) & (slots["world_size"] <= MOST_RANKS)
    whole: Slots = slots[is_own & np.array(is_whole, dtype=bool)]
    return whole


def _of(function: Callable[[list[float]], float], values: Iterable[float | None]) -> float | None:
    measured = [value for value in values if value is not None]
    return function(measured) if measured else None
