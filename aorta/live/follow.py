"""Follows the records of all ranks of a run from their ends on."""

from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from aorta.errors import NOT_JSON
from aorta.records.files import STEPS_FILE, STEPS_FILES
from aorta.records.schema import StepRecord
from aorta.timeline.types import OWN_SOURCES

FIRST_BYTES = 1 << 20
"""Read back from the end of a file that is there already."""
RECENT_STEPS = 20


@dataclass
class FollowedRank:
    """The latest of one rank."""

    rank: int
    last: StepRecord | None = None
    recent: "deque[StepRecord]" = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))
    """The newest steps, oldest first."""
    offset: int | None = None
    inode: int | None = None
    cut_line: bytes = b""

    def median(self, name: str) -> float | None:
        """Median of a number of the recent steps, by its name in the record or in its overlap."""
        values = sorted(v for v in (_number(record, name) for record in self.recent) if v is not None)
        return values[len(values) // 2] if values else None


class Follower:
    """Reads what was added to the files of a folder since the last `poll`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ranks: dict[int, FollowedRank] = {}
        self._decoder = msgspec.json.Decoder(StepRecord)

    def poll(self) -> bool:
        """Read on; True where anything was added. A file that was replaced is read afresh."""
        changed = False
        for path in sorted(self.folder.glob(STEPS_FILES)):
            match = STEPS_FILE.fullmatch(path.name)
            if match is not None:
                state = self.ranks.setdefault(int(match[1]), FollowedRank(int(match[1])))
                changed |= self._read_on(path, state)
        return changed

    def _read_on(self, path: Path, state: FollowedRank) -> bool:
        try:
            with open(path, "rb") as file:
                status = path.stat()
                if state.inode != status.st_ino or (state.offset or 0) > status.st_size:
                    self.ranks[state.rank] = state = FollowedRank(state.rank, inode=status.st_ino)
                    state.offset = max(0, status.st_size - FIRST_BYTES)
                file.seek(state.offset or 0)
                data = file.read()
                state.offset = file.tell()
        except OSError:
            return False
        *lines, state.cut_line = (state.cut_line + data).split(b"\n")
        for line in lines:
            try:
                record = self._decoder.decode(line)
            except NOT_JSON:
                continue  # the first one may be cut
            if record.source in OWN_SOURCES:
                state.recent.append(record)
                state.last = record
        return bool(lines)


def _number(record: StepRecord, name: str) -> float | None:
    value = getattr(record, name) if hasattr(record, name) else getattr(record.overlap, name, None)
    return None if value is None else float(value)
