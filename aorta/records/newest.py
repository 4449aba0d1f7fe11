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
from aorta.records.files import STEPS_FILE, STEPS_FILES, state_name, steps_name
from aorta.records.lines import LONGEST_LINE, fault_of, version_error
from aorta.records.schema import READABLE_VERSIONS, DeviceRecord, MemoryRecord, StepRecord
from aorta.records.seal import seal_of
from aorta.records.state import read_state
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
    memory: MemoryRecord | None = None
    device: DeviceRecord | None = None
    """The newest ones: a line without details has them where they are others than before."""
    has_first: bool = True
    """True: recent begins with the first step of the attempt, which holds the program's start."""
    num_collectives: int = 0
    """Of all steps that were read."""
    offset: int = 0
    inode: int | None = None
    cut_line: bytes = b""
    num_damaged: int = 0
    """Lines of the part that was read that are changed, missing, out of order or another rank's."""
    number: int | None = None
    """Of the last line, from its seal."""
    num_unnumbered: int = 0
    """Damaged lines since then: the gap in the numbers that they leave is counted with them."""
    fault: str | None = None
    """Why the file could not be read last time."""

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
            self.detailed = self.memory = self.device = None
        elif key_of(record) <= key_of(last):
            return
        self.has_first = self.has_first and len(self.recent) < SHOWN_STEPS + AHEAD_STEPS
        self.num_collectives += record.num_collectives
        self.recent.append(record)
        if record.is_recorded:
            self.recorded.append(record)
        if record.collectives is not None:
            self.detailed = record
        self.memory, self.device = record.memory or self.memory, record.device or self.device


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
        """Read on; True where anything was added. A file that was replaced is read afresh.

        RecordError for lines of a schema that is not read here.
        """
        changed = False
        for path in sorted(self.folder.glob(STEPS_FILES)):
            match = STEPS_FILE.fullmatch(path.name)
            if match is not None and self._wanted(int(match[1])):
                state = self.ranks.setdefault(int(match[1]), FollowedRank(int(match[1])))
                changed |= self._read_on(path, state)
        return changed

    def damage(self) -> list[str]:
        """What is damaged or missing, a text each: the means are of what is left."""
        texts: list[str] = []
        for rank, state in sorted(self.ranks.items()):
            if state.fault is not None:
                texts.append(f"{steps_name(rank)} cannot be read: {state.fault}")
            if state.cut_line and not self._is_alive(rank):  # else the line is just being written
                texts.append(f"{steps_name(rank)} ends within a line")
            if state.num_damaged:
                texts.append(f"{state.num_damaged} lines of {steps_name(rank)} are damaged or missing")
        lasts = {rank: state.last for rank, state in sorted(self.ranks.items()) if state.last is not None}
        if not lasts:
            return texts
        latest = max(lasts.values(), key=lambda record: record.end_unix_ns)
        shown = [rank for rank, last in lasts.items() if attempt_of(last) == attempt_of(latest)]
        if num_absent := max(0, latest.world_size - len(shown)):
            texts.append(f"{num_absent} of {latest.world_size} ranks have no step here")
        behind = [rank for rank in shown if lasts[rank].global_step < latest.global_step - AHEAD_STEPS]
        if behind:
            step = lasts[behind[0]].global_step
            texts.append(f"rank {behind[0]} ends at step {step}, rank {latest.rank} at {latest.global_step}")
        return texts

    def _is_alive(self, rank: int) -> bool:
        state = read_state(self.folder / state_name(rank))
        return state is not None and (state.has_writer or state.is_alive is True)

    def _read_on(self, path: Path, state: FollowedRank) -> bool:
        is_cut = False
        try:
            with open_regular(path) as file:
                status = os.fstat(file.fileno())
                if state.inode != status.st_ino or state.offset > status.st_size:
                    if state.last is not None and state.last.run_id is None:  # nothing tells which run it is
                        self.ranks[state.rank] = state = FollowedRank(state.rank)
                    state.inode, state.cut_line = status.st_ino, b""
                    state.num_damaged, state.number, state.num_unnumbered = 0, None, 0
                    state.offset = max(0, status.st_size - FIRST_BYTES)
                    is_cut = state.offset > 0
                    state.has_first = state.has_first and not is_cut
                file.seek(state.offset)
                data = file.read(MOST_BYTES)
                state.offset = file.tell()
        except OSError as error:
            state.fault = error.strerror or str(error)
            return False
        state.fault = None
        *lines, state.cut_line = (state.cut_line + data).split(b"\n")
        if len(state.cut_line) >= LONGEST_LINE:
            state.cut_line = b""  # no run writes such a line
        for place, line in enumerate(lines):
            if place == 0 and is_cut:
                continue  # FIRST_BYTES begin within it
            self._take(line, state)
        return bool(lines)

    def _take(self, line: bytes, state: FollowedRank) -> None:
        """Add the record of a line of the run's own, and count a line that is damaged or another rank's: a
        number that is not the run's would be believed."""
        seal = seal_of(line)
        try:
            record = self._decoder.decode(line)
        except NOT_JSON:
            state.num_damaged += 1
            state.num_unnumbered += 1
            return
        is_whole = seal.is_whole if seal is not None else record.run_id is None
        if not is_whole or record.rank != state.rank or fault_of(record) is not None:
            state.num_damaged += 1
            state.num_unnumbered += 1
            return
        if record.schema not in READABLE_VERSIONS:
            raise version_error(self.folder / steps_name(state.rank), None, record.schema)
        if seal is not None:
            if state.number is not None:
                state.num_damaged += abs(seal.number - state.number - 1 - state.num_unnumbered)
            state.number, state.num_unnumbered = seal.number, 0
        if record.source in OWN_SOURCES:
            state.add(record)
