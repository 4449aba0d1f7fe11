"""How many collectives a rank has issued in each group, in a mapped file: it outlives a rank that cannot
report.

For ranks on GPUs, where noting every call whole (aorta.hang.last_calls) would cost microseconds beside the
launch of a kernel: two numbers are written per call. What the calls were, the other ranks' reports say.
"""

import os
import struct
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from aorta.hang.mapped import new_mapped_file

if TYPE_CHECKING:
    from aorta.record.calls import CollectiveCall, RecordedStep

MOST_GROUPS = 256
"""Groups that come later are not counted."""
SLOT_BYTES = 128
_HEAD = struct.Struct("=qq")
_MOST_KEY_BYTES = SLOT_BYTES - _HEAD.size
_WORDS = SLOT_BYTES // 8


class GroupCount(NamedTuple):
    """What a rank has issued in a group."""

    num_seen: int
    step: int
    """Global step of the last of them."""


class CallCounts:
    """The file of one rank. Raises OSError where it cannot be made."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._map = new_mapped_file(path, SLOT_BYTES * MOST_GROUPS)
        self._words = memoryview(self._map).cast("q")
        self._places: dict[str, int | None] = {}
        """By the group's key: index of its first word, None where there is no room for it."""
        self._num_slots = 0

    def note(self, step: "RecordedStep", call: "CollectiveCall") -> None:
        """The rank issues this call."""
        key = call.group.key
        place = self._places[key] if key in self._places else self._new_place(key)
        if place is not None:
            self._words[place] = call.seq + 1
            self._words[place + 1] = step.global_step

    def _new_place(self, key: str) -> int | None:
        data = key.encode()
        place = None
        if self._num_slots < MOST_GROUPS and len(data) <= _MOST_KEY_BYTES:
            start = self._num_slots * SLOT_BYTES
            self._map[start + _HEAD.size : start + _HEAD.size + len(data)] = data
            place = self._num_slots * _WORDS
            self._num_slots += 1
        if len(self._places) < 2 * MOST_GROUPS:  # a script may make a group in every step
            self._places[key] = place
        return place

    def remove(self) -> None:
        """The run has ended well: nobody will ask."""
        with suppress(OSError):
            self._path.unlink(missing_ok=True)


def read_counts(path: Path) -> dict[str, GroupCount]:
    """By the group's key; empty where there is no such file."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            data = file.read(SLOT_BYTES * MOST_GROUPS)
    except OSError:
        return {}
    counts = {}
    for start in range(0, len(data) - SLOT_BYTES + 1, SLOT_BYTES):
        num_seen, step = _HEAD.unpack_from(data, start)
        with suppress(UnicodeDecodeError):
            key = data[start + _HEAD.size : start + SLOT_BYTES].rstrip(b"\0").decode()
            if key and num_seen > 0 and step >= 0:
                counts[key] = GroupCount(num_seen, step)
    return counts
