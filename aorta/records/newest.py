"""The newest steps of every rank of a running job, read on from its files.

aorta.account.newest has their means, and who is waited for.
"""

import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from aorta.errors import NOT_JSON
from aorta.files import open_regular
from aorta.records.files import STEPS_FILE, STEPS_FILES
from aorta.records.lines import LONGEST_LINE, fault_of
from aorta.records.schema import StepRecord
from aorta.records.seal import seal_of
from aorta.timeline.types import OWN_SOURCES

FIRST_BYTES = 1 << 20
"""Read back from the end of a file that is there already."""
MOST_BYTES = 1 << 26
"""Read of one file at once; the rest is read by the next poll."""
SHOWN_STEPS = 20
"""The newest steps that all ranks have; the numbers shown are means over them."""
AHEAD_STEPS = 4
"""Steps that a rank's file may be ahead of another's: kept, so that SHOWN_STEPS are common to all."""

StepKey = tuple[int, int]
"""(rollbacks, global step): pairs that rise within an attempt."""


@dataclass
class FollowedRank:
    """The newest steps of one rank, and how far its file was read."""

    rank: int
    recent: "deque[StepRecord]" = field(default_factory=lambda: deque(maxlen=SHOWN_STEPS + AHEAD_STEPS))
    """Those of the newest attempt, oldest first."""
    recorded: "deque[StepRecord]" = field(default_factory=lambda: deque(maxlen=SHOWN_STEPS + AHEAD_STEPS))
    """The newest that the overhead did not leave out: the others have their length alone."""
    detailed: StepRecord | None = None
    """The newest one that lists its collectives, which tell the groups of the others."""
    has_first: bool = True
    """True: recent begins with the first step of the attempt, which holds the program's start."""
    num_collectives: int = 0
    """Of all steps that were read."""
    offset: int = 0
    inode: int | None = None
    cut_line: bytes = b""

    @property
    def last(self) -> StepRecord | None:
        return self.recent[-1] if self.recent else None

    def add(self, record: StepRecord) -> None:
        """Take a line. One that was read already is left out: a file that is made smaller is read again."""
        last = self.last
        if last is None or attempt_of(record) != attempt_of(last):
            self.has_first = record.attempt == 0 and (last is not None or self.has_first)
            if last is not None and record.run_id != last.run_id:
                self.num_collectives = 0
            self.recent.clear()
            self.recorded.clear()
            self.detailed = None
        elif key_of(record) <= key_of(last):
            return
        self.has_first = self.has_first and len(self.recent) < SHOWN_STEPS + AHEAD_STEPS
        self.num_collectives += record.num_collectives
        self.recent.append(record)
        if record.is_recorded:
            self.recorded.append(record)
        if record.collectives is not None:
            self.detailed = record


def key_of(record: StepRecord) -> StepKey:
    return record.rollbacks, record.global_step


def attempt_of(record: StepRecord) -> tuple[str | None, int]:
    return record.run_id, record.attempt


class Follower:
    """Reads what was added to the files of a folder since the last `poll`."""

    def __init__(self, folder: Path, wanted: Callable[[int], bool] = lambda rank: True) -> None:
        """wanted: True for the ranks whose files are read."""
        self.folder = folder
        self.ranks: dict[int, FollowedRank] = {}
        self._wanted = wanted
        self._decoder = msgspec.json.Decoder(StepRecord)

    def poll(self) -> bool:
        """Read on; True where anything was added. A file that was replaced is read afresh."""
        changed = False
        for path in sorted(self.folder.glob(STEPS_FILES)):
            match = STEPS_FILE.fullmatch(path.name)
            if match is not None and self._wanted(int(match[1])):
                state = self.ranks.setdefault(int(match[1]), FollowedRank(int(match[1])))
                changed |= self._read_on(path, state)
        return changed

    def _read_on(self, path: Path, state: FollowedRank) -> bool:
        try:
            with open_regular(path) as file:
                status = os.fstat(file.fileno())
                if state.inode != status.st_ino or state.offset > status.st_size:
                    if state.last is not None and state.last.run_id is None:  # nothing tells which run it is
                        self.ranks[state.rank] = state = FollowedRank(state.rank)
                    state.inode, state.cut_line = status.st_ino, b""
                    state.offset = max(0, status.st_size - FIRST_BYTES)
                    state.has_first = state.has_first and state.offset == 0
                file.seek(state.offset)
                data = file.read(MOST_BYTES)
                state.offset = file.tell()
        except OSError:
            return False
        *lines, state.cut_line = (state.cut_line + data).split(b"\n")
        if len(state.cut_line) >= LONGEST_LINE:
            state.cut_line = b""  # no run writes such a line
        for line in lines:
            record = self._whole(line, state.rank)
            if record is not None:
                state.add(record)
        return bool(lines)

    def _whole(self, line: bytes, rank: int) -> StepRecord | None:
        """The record of a line of the run's own; None for one that is cut, damaged or another rank's:
        a number that is not the run's would be believed."""
        seal = seal_of(line)
        try:
            record = self._decoder.decode(line)
        except NOT_JSON:
            return None  # the first one may be cut
        is_whole = seal.is_whole if seal is not None else record.run_id is None
        is_ours = record.rank == rank and record.source in OWN_SOURCES
        return record if is_whole and is_ours and fault_of(record) is None else None
